#!/bin/bash
#SBATCH --job-name=longhorn_scaling
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --time=00:30:00
# Strong and weak scaling of a product on Longhorn, 1, 2, 4, … ranks: sbatch -A ACCOUNT -p QUEUE --nodes=4
# jobs/longhorn_scaling.sh from a clone on $SCRATCH. SIZE (16384), DTYPE (float32) and OUT may be set before.
# Next: steps.sh, clusters/longhorn.sh (what could not be verified).
set -euo pipefail
jobs=${SLURM_SUBMIT_DIR:?"submit it with sbatch, from the repository"}/jobs # Slurm runs a copy of this file, elsewhere
source "$jobs/clusters/longhorn.sh"
source "$jobs/steps.sh"

check
sweep_devices
