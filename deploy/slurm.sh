#!/usr/bin/env bash
# Trains on a Slurm cluster, one torchrun a node:
#
#   sbatch --nodes 1 --gpus-per-node 8 deploy/slurm.sh configs/shop.yaml runs/mine --seed 1
#
# The run folder has to be on a disk that all nodes share. A job that was requeued, or is given
# again with the same folder, goes on where it stopped; --training.max_steps 120 then trains for
# longer. With an environment or algorithm of your own add --trust-remote-code: going on needs it.
# After --time nothing is requeued: give the job again. The Python is that of .venv, or of PYTHON.
#SBATCH --job-name=ragen-apo
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

if [[ $# -lt 2 ]]; then
  echo "usage: sbatch deploy/slurm.sh CONFIG RUN_DIR [--key value ...]" >&2
  exit 2
fi
config=$1 run=$2
shift 2

arguments=(train --run-dir "$run")
if [[ -f $run/config.yaml ]]; then
  arguments+=(--resume "$@")
else
  arguments+=(--config "$config")
  for argument in "$@"; do # a new run is trusted by its configuration
    [[ $argument = --trust-remote-code ]] || arguments+=("$argument")
  done
fi

nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${nodes%%$'\n'*}
# A port of its own for each job, since two jobs may share a node.
port=$((20000 + SLURM_JOB_ID % 20000))

# From Slurm 22.05 until 23.11 srun does not take over the job's --cpus-per-task by itself.
# torchrun reads the number of its node from PET_NODE_RANK. With --rdzv-backend c10d it would need none,
# but after a lost network it would wait a quarter of an hour for its store on the first node.
# shellcheck disable=SC2016 # $SLURM_NODEID is for the shell on each node
srun --kill-on-bad-exit=1 ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
  bash -c 'PET_NODE_RANK=$SLURM_NODEID exec "$@"' bash \
  "${PYTHON:-.venv/bin/python}" -m torch.distributed.run \
  --nnodes "$SLURM_NNODES" \
  --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" \
  --master-addr "$first" \
  --master-port "$port" \
  -m ragen_apo.cli "${arguments[@]}"
