#!/bin/bash
#SBATCH --job-name=cpu_train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --exclusive
#SBATCH --time=02:00:00
# Train without GPUs, each rank on cores of its own: sbatch -A ACCOUNT -p PARTITION jobs/cpu_train.sh from the repository; another
# shape: GRID=x=4,y=2,z=2 sbatch --nodes=4 … jobs/cpu_train.sh        (x·y·z is the number of ranks)
# It stops at its time limit and goes on when submitted again; a second part that starts only if the first did not finish:
#   sbatch --dependency=afternotok:JOBID --kill-on-invalid-dep=yes jobs/cpu_train.sh
# Next: steps.sh (CONFIG, RUN, SCHEME, CHECKPOINT_EVERY), clusters/cpu.sh (what a site fills in).
set -euo pipefail
jobs=${SLURM_SUBMIT_DIR:?"submit it with sbatch, from the repository"}/jobs # Slurm runs a copy of this file, elsewhere
source "$jobs/clusters/cpu.sh"
source "$jobs/steps.sh"

GRID=${GRID:-x=2,y=2,z=2}
check
train
