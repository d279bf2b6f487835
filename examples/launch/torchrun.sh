#!/usr/bin/env bash
# made by: shardwright plan --layers 4 --width 128 --heads 4 --vocabulary 256 --hosts 2 --ranks 2 --memory 4GB --cpus 1 --name gpt --launch torchrun -- examples/train_gpt.py
#
# Run this on each host. MASTER_ADDR is an address of one of them that all reach.
set -euo pipefail
: "${MASTER_ADDR:?an address of one host that all hosts reach}"
export OMP_NUM_THREADS=1
exec torchrun --nnodes=2 --nproc-per-node=2 --max-restarts=3 \
    --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:29500" --rdzv-id=gpt \
    examples/train_gpt.py
