#!/usr/bin/env bash
# One host's part of a training run on several hosts. The same command on each, but for NODE_RANK:
#
#     MASTER_ADDR=node0 NODES=2 NODE_RANK=0 RANKS=2 examples/launch/torchrun.sh examples/train_gpt.py --steps 100
#
# MASTER_ADDR is the host with NODE_RANK 0, as all others reach it. torchrun gives every rank RANK, WORLD_SIZE, LOCAL_RANK,
# MASTER_ADDR and MASTER_PORT, which sw.wrap reads. On hosts with several networks, export GLOO_SOCKET_IFNAME.
set -euo pipefail

: "${MASTER_ADDR:?the address of the host with NODE_RANK 0}"
: "${NODES:?how many hosts there are}"
: "${NODE_RANK:?which of them this is, from 0}"

exec torchrun \
    --nnodes "$NODES" \
    --node-rank "$NODE_RANK" \
    --nproc-per-node "${RANKS:-1}" \
    --master-addr "$MASTER_ADDR" \
    --master-port "${MASTER_PORT:-29500}" \
    "$@"
