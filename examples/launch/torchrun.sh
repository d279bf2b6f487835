#!/usr/bin/env bash
# Start the ranks of one host in a run on several hosts. Run the same command on each host, with its own NODE_RANK:
#
#     MASTER_ADDR=node0 NODES=2 NODE_RANK=0 RANKS=2 examples/launch/torchrun.sh examples/train_gpt.py --steps 100
#
# MASTER_ADDR is an address of the host with NODE_RANK 0 that all hosts reach. torchrun sets RANK, WORLD_SIZE, LOCAL_RANK,
# MASTER_ADDR and MASTER_PORT for every rank, and sw.wrap reads them. On hosts with several networks, export
# GLOO_SOCKET_IFNAME.
set -euo pipefail

: "${MASTER_ADDR:?the address of the host with NODE_RANK 0}"
: "${NODES:?the number of hosts}"
: "${NODE_RANK:?the number of this host, from 0}"

exec torchrun \
    --nnodes "$NODES" \
    --node-rank "$NODE_RANK" \
    --nproc-per-node "${RANKS:-1}" \
    --master-addr "$MASTER_ADDR" \
    --master-port "${MASTER_PORT:-29500}" \
    "$@"
