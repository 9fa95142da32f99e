#!/bin/bash
#SBATCH --job-name=cuda_train
#SBATCH --nodes=1
#SBATCH --gpus-per-node=4
#SBATCH --exclusive
#SBATCH --time=02:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
# Training on a CUDA cluster, one rank per GPU. Submit it from the repository:
#   sbatch -A ACCOUNT -p PARTITION jobs/cuda_train.sh
# Several nodes (x·y·z is the number of nodes times the GPUs of a node):
#   GRID=x=4,y=2,z=2 sbatch --nodes=4 … jobs/cuda_train.sh
# Before its time limit the job saves and goes back into the queue. A job that ended otherwise continues when it is submitted
# again. This second job starts only if the first one did not finish:
#   sbatch --dependency=afternotok:JOBID --kill-on-invalid-dep=yes jobs/cuda_train.sh
# CONFIG, RUN, SCHEME, CHECKPOINT_EVERY and SET (steps.sh) may be set in the environment.
# clusters/cuda.sh holds a site's settings.
set -euo pipefail
jobs=${SLURM_SUBMIT_DIR:?"submit it with sbatch, from the repository"}/jobs # Slurm runs a copy of this file from another folder
source "$jobs/steps.sh"
source "$jobs/clusters/cuda.sh"

GRID=${GRID:-x=2,y=2,z=1}
record "$RUN"
check
train
