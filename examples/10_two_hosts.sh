#!/bin/sh
# Train 10_survive.py on two hosts made of network namespaces of this machine (needs root, and iproute2):
#
#     examples/10_two_hosts.sh /tmp/survive --memory 1 --replicas 1 --every 10 --silent 1
#     shardwright chaos --plan examples/10_cut.json -- examples/10_two_hosts.sh '/tmp/survive-{run}' --memory 1 --replicas 1 --silent 1
#
# Each host has its own torchrun with one rank, its own guardian and its own abstract sockets. The link is the device eth0 in the
# namespace sw-b: `ip -n sw-b link set eth0 down` cuts it.
set -eu
here=$(dirname "$0")
name=${SW_HOSTS:-sw} # of the namespaces
for host in a b; do
    ip netns del $name-$host 2>/dev/null || true
    ip netns add $name-$host
    ip -n $name-$host link set lo up
done
trap 'ip netns del $name-a; ip netns del $name-b' EXIT
trap 'exit 143' TERM INT
ip -n $name-a link add eth0 type veth peer name eth0 netns $name-b
ip -n $name-a addr add 10.79.0.1/24 dev eth0
ip -n $name-b addr add 10.79.0.2/24 dev eth0
pids=""
for number in 1 2; do
    host=$(echo ab | cut -c $number)
    ip -n $name-$host link set eth0 up
    GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1 ip netns exec $name-$host \
        unshare --uts sh -c "hostname $name-$host; exec python -m torch.distributed.run \"\$@\"" sh \
        --nnodes 2 --nproc-per-node 1 --max-restarts 20 --monitor-interval 0.1 --local-addr 10.79.0.$number \
        --rdzv-backend c10d --rdzv-endpoint 10.79.0.1:29400 --rdzv-conf is_host=$((2 - number)) \
        "$here/10_survive.py" "$@" &
    pids="$pids $!"
done
code=0
for pid in $pids; do
    wait "$pid" || code=$?
done
exit $code
