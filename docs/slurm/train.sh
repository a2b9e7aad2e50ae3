#!/bin/bash
# A training run as a SLURM batch job. The arguments are those of `python -m gpt2_fp8.run`:
#
#   sbatch --time=24:00:00 docs/slurm/train.sh model=gpt2 data=fineweb run_name=long
#
# Two nodes of eight GPUs, one process a GPU:
#
#   sbatch --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 docs/slurm/train.sh \
#     model=gpt2_xl data=fineweb trainer=ddp trainer.devices=8 trainer.num_nodes=2 run_name=large
#
# Options on sbatch's command line override those below. sbatch passes its environment on: activate the virtual
# environment before, or load modules here.
#SBATCH --job-name=gpt2_fp8
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=5
#SBATCH --signal=USR1@120
#SBATCH --requeue
set -euo pipefail

# Since SLURM 22.05 srun does not inherit --cpus-per-task.
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"

# The rendezvous of several nodes: the first of them.
export MASTER_ADDR="${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}"

# Compiled kernels stay on the node's own disk. With data.cache_dir=FOLDER, so does tokenized text.
caches="${SCRATCH:-${TMPDIR:-/tmp}}/gpt2_fp8-$(id -un)"
export TRITON_CACHE_DIR="$caches/triton" TORCHINDUCTOR_CACHE_DIR="$caches/inductor"

# The same folder in each turn (the last run_name= counts), and from its last checkpoint, if there is one.
srun --kill-on-bad-exit=1 python -m gpt2_fp8.run run_name="slurm-$SLURM_JOB_ID" ckpt_path=last "$@"
