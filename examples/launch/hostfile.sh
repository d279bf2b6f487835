#!/usr/bin/env bash
# made by: shardwright plan --layers 4 --width 128 --heads 4 --vocabulary 256 --hosts 2 --ranks 2 --memory 4GB --cpus 1 --name gpt --hostfile examples/launch/hosts --launch hostfile -- examples/train_gpt.py
#
# torchrun on each host of examples/launch/hosts, over ssh, in this folder. The first host is the meeting point.
set -euo pipefail
here=$(printf %q "$PWD")
command='cd {} && export OMP_NUM_THREADS=1 && exec torchrun --nnodes=2 --nproc-per-node=2 --max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint="node0:29500" --rdzv-id=gpt examples/train_gpt.py'
for host in node0 node1; do
    ${SSH:-ssh} "$host" "${command/\{\}/$here}" &
done
status=0
for child in $(jobs -p); do wait "$child" || status=$?; done
exit $status
