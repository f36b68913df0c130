#!/bin/bash
# Two machines with eight GPUs each, on SLURM:   sbatch slurm.sh sft.yaml
# Submit it in a folder that all machines share; posttrain must be on the PATH there.
#SBATCH --job-name=posttrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@120
# The last line sends SIGTERM two minutes before the time is up: the run then saves its last step. A requeued job keeps
# its number and resumes.
set -euo pipefail

name="run-$SLURM_JOB_ID"
start=("$1" --name "$name")
if [ -e "runs/$name/run.json" ]; then
    start=(--resume "runs/$name")
fi
read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

# One task on each machine; it starts a process for each GPU.
srun --kill-on-bad-exit=1 bash -c 'exec posttrain launch "${@:2}" --nproc "$SLURM_GPUS_ON_NODE" \
    --nodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --address "$1:29500"' posttrain "$first" "${start[@]}"
