#!/bin/bash
#SBATCH --job-name=longhorn_train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --time=02:00:00
# Train on TACC Longhorn, one rank per GPU: sbatch -A ACCOUNT -p QUEUE jobs/longhorn_train.sh from a clone on $SCRATCH; several
# nodes: GRID=x=4,y=2,z=2 sbatch --nodes=4 … jobs/longhorn_train.sh        (x·y·z is 4 times the nodes)
# It stops at its time limit and goes on when submitted again; a second part that starts only if the first did not finish:
#   sbatch --dependency=afternotok:JOBID --kill-on-invalid-dep=yes jobs/longhorn_train.sh
# Next: steps.sh (CONFIG, RUN, SCHEME, CHECKPOINT_EVERY), clusters/longhorn.sh (what could not be verified).
set -euo pipefail
jobs=${SLURM_SUBMIT_DIR:?"submit it with sbatch, from the repository"}/jobs # Slurm runs a copy of this file, elsewhere
source "$jobs/clusters/longhorn.sh"
source "$jobs/steps.sh"

GRID=${GRID:-x=2,y=2,z=1}
check
train
