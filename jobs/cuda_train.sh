#!/bin/bash
#SBATCH --job-name=cuda_train
#SBATCH --nodes=1
#SBATCH --gpus-per-node=4
#SBATCH --exclusive
#SBATCH --time=02:00:00
# Train on a CUDA cluster, one rank per GPU: sbatch -A ACCOUNT -p PARTITION jobs/cuda_train.sh from the repository; several nodes:
#   GRID=x=4,y=2,z=2 sbatch --nodes=4 … jobs/cuda_train.sh        (x·y·z is nodes times GPUs of a node)
# It stops at its time limit and goes on when submitted again; a second part that starts only if the first did not finish:
#   sbatch --dependency=afternotok:JOBID --kill-on-invalid-dep=yes jobs/cuda_train.sh
# Next: steps.sh (CONFIG, RUN, SCHEME, CHECKPOINT_EVERY), clusters/cuda.sh (what a site fills in).
set -euo pipefail
jobs=${SLURM_SUBMIT_DIR:?"submit it with sbatch, from the repository"}/jobs # Slurm runs a copy of this file, elsewhere
source "$jobs/clusters/cuda.sh"
source "$jobs/steps.sh"

GRID=${GRID:-x=2,y=2,z=1}
check
train
