#!/usr/bin/env bash
# %made_by
#SBATCH --job-name=%name
#SBATCH --nodes=%hosts
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=%cpus%gpus
#SBATCH --time=%time
#SBATCH --signal=B:USR1@%notice
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%%x-%%j.out
#
# One torchrun per node starts its ranks. This script gets USR1 before the time limit, and torchrun TERM, which it hands
# on: with sw.Checkpointer(..., save_on=(signal.SIGTERM,)) the ranks save and end, within 30 s. The job then goes back
# into the queue until the program has made the file `done`. A job that fails is not started again.
set -euo pipefail
%threads
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
noticed=
trap 'noticed=yes; scancel --signal=TERM "$SLURM_JOB_ID"' USR1 # to srun's steps
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 %torchrun &
step=$!
status=0
wait "$step" || status=$?
[ -n "$noticed" ] || exit "$status"
wait "$step" || true # the signal ended the first wait; torchrun ends with another code than its ranks
[ -e done ] || scontrol requeue "$SLURM_JOB_ID"
