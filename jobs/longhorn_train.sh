#!/bin/bash
#SBATCH --job-name=longhorn_train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --time=02:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
# Training on TACC Longhorn, one rank per GPU. Submit it from a clone on $SCRATCH:
#   sbatch -A ACCOUNT -p QUEUE jobs/longhorn_train.sh
# Several nodes (x·y·z is four times the number of nodes):
#   GRID=x=4,y=2,z=2 sbatch --nodes=4 … jobs/longhorn_train.sh
# Before its time limit the job saves and goes back into the queue. A job that ended otherwise continues when it is submitted
# again. This second job starts only if the first one did not finish:
#   sbatch --dependency=afternotok:JOBID --kill-on-invalid-dep=yes jobs/longhorn_train.sh
# CONFIG, RUN, SCHEME, CHECKPOINT_EVERY and SET (steps.sh) may be set in the environment.
# clusters/longhorn.sh marks what could not be verified.
set -euo pipefail
jobs=${SLURM_SUBMIT_DIR:?"submit it with sbatch, from the repository"}/jobs # Slurm runs a copy of this file from another folder
source "$jobs/steps.sh"
source "$jobs/clusters/longhorn.sh"

GRID=${GRID:-x=2,y=2,z=1}
record "$RUN"
check
train
