#!/bin/bash
#SBATCH --job-name=cpu_train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --exclusive
#SBATCH --time=02:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
# Training on CPUs, each rank bound to its own cores. Submit it from the repository:
#   sbatch -A ACCOUNT -p PARTITION jobs/cpu_train.sh
# Another grid (x·y·z is the number of ranks):
#   GRID=x=4,y=2,z=2 sbatch --nodes=4 … jobs/cpu_train.sh
# Before its time limit the job saves and goes back into the queue. A job that ended otherwise continues when it is submitted
# again. This second job starts only if the first one did not finish:
#   sbatch --dependency=afternotok:JOBID --kill-on-invalid-dep=yes jobs/cpu_train.sh
# CONFIG, RUN, SCHEME, CHECKPOINT_EVERY and SET (steps.sh) may be set in the environment.
# clusters/cpu.sh holds a site's settings.
set -euo pipefail
jobs=${SLURM_SUBMIT_DIR:?"submit it with sbatch, from the repository"}/jobs # Slurm runs a copy of this file from another folder
source "$jobs/steps.sh"
source "$jobs/clusters/cpu.sh"

GRID=${GRID:-x=2,y=2,z=2}
record "$RUN"
check
train
