#!/bin/bash
#SBATCH --job-name=longhorn_scaling
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --time=00:30:00
# Strong and weak scaling of a product on TACC Longhorn, on 1, 2, 4, … ranks. Submit it from a clone on $SCRATCH:
#   sbatch -A ACCOUNT -p QUEUE --nodes=4 jobs/longhorn_scaling.sh
# SIZE (16384), DTYPE (float32) and OUT may be set in the environment. clusters/longhorn.sh marks what could not be verified.
set -euo pipefail
jobs=${SLURM_SUBMIT_DIR:?"submit it with sbatch, from the repository"}/jobs # Slurm runs a copy of this file from another folder
source "$jobs/steps.sh"
source "$jobs/clusters/longhorn.sh"

record "$OUT"
check
scaling strong "${SIZE:-16384}"
scaling weak "${SIZE:-16384}"
tables "$OUT/strong" "$OUT/weak"
