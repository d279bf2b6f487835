#!/usr/bin/env bash
# made by: shardwright plan --layers 4 --width 128 --heads 4 --vocabulary 256 --hosts 2 --ranks 2 --memory 4GB --cpus 1 --name gpt --launch accelerate -- examples/train_gpt.py
set -euo pipefail
export OMP_NUM_THREADS=1
export ACCELERATE_USE_CPU=1
# Run this on each host, with its own NODE_RANK. MASTER_ADDR is an address of the host with NODE_RANK 0.
: "${MASTER_ADDR:?the address of the host with NODE_RANK 0}" "${NODE_RANK:?the number of this host, from 0}"
exec accelerate launch --multi_gpu --num_processes 4 --mixed_precision no \
    --num_machines 2 --machine_rank "$NODE_RANK" --main_process_ip "$MASTER_ADDR" --main_process_port 29500 --dynamo_backend no \
    -m shardwright run zero=0 examples/train_gpt.py
