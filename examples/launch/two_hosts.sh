#!/usr/bin/env bash
# Make two hosts of this machine, with 1 Gbit/s between them, and run torchrun on both:
#
#     examples/launch/two_hosts.sh examples/train_gpt.py --steps 100
#
# Each host is a network namespace with its own name. Ranks of different hosts share no abstract socket, only the wire.
# RANKS=2 on each host, RATE=1gbit. Needs iproute2, util-linux and hostname, and root or user namespaces. Nothing stays:
# the namespaces end with this script in any case.
set -euo pipefail
if [ -z "${SW_TWO_HOSTS:-}" ]; then
    as_root=()
    [ "$(id -u)" = 0 ] || as_root=(--user --map-root-user)
    SW_TWO_HOSTS=1 exec unshare "${as_root[@]}" --net --uts --pid --fork --kill-child --mount-proc "$BASH" "$0" "$@"
fi

# torch warns about addresses without names. The file is visible only inside the namespaces.
names=$(mktemp)
printf '127.0.0.1 localhost\n10.77.0.1 host0\n10.77.0.2 host1\n' >"$names"
mount --bind "$names" /etc/hosts
rm "$names"

# This process is on host0. A sleeping process holds host1.
unshare --net --uts sleep infinity &
holder=$!
until [ "$(readlink /proc/$holder/exe)" = "$(readlink -f "$(command -v sleep)")" ]; do sleep 0.01; done
on_host1() { nsenter --net=/proc/$holder/ns/net --uts=/proc/$holder/ns/uts "$@"; }

link_up() {
    hostname "$1"
    ip link set lo up
    ip addr add "$2" dev eth0
    ip link set eth0 up
    tc qdisc add dev eth0 root tbf rate "$3" burst 256kb latency 100ms
}
ip link add eth0 type veth peer name eth0 netns $holder
link_up host0 10.77.0.1/24 "${RATE:-1gbit}"
on_host1 "$BASH" -c "set -e; $(declare -f link_up); link_up host1 10.77.0.2/24 '${RATE:-1gbit}'"

export MASTER_ADDR=10.77.0.1 GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
launch=(torchrun --nnodes 2 --nproc-per-node "${RANKS:-2}" --master-addr "$MASTER_ADDR" --master-port 29500)
on_host1 "${launch[@]}" --node-rank 1 "$@" &
other=$!
status=0
"${launch[@]}" --node-rank 0 "$@" || status=$?
[ $status = 0 ] || kill $other 2>/dev/null || true
wait $other || [ $status != 0 ] || status=$?
read -r _ _ _ _ _ _ _ _ _ sent _ < <(grep eth0: /proc/net/dev | sed 's/:/ /')
echo "host0 sent $((sent / 1000000)) MB"
exit $status
