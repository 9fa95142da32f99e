#!/bin/bash
#SBATCH --job-name=cpu_scaling
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --exclusive
#SBATCH --time=00:30:00
# Strong and weak scaling of a product on CPUs, on 1, 2, 4, … ranks. Submit it from the repository:
#   sbatch -A ACCOUNT -p PARTITION jobs/cpu_scaling.sh
# SIZE (8192), DTYPE (float32) and OUT may be set in the environment. clusters/cpu.sh holds the settings of a site.
set -euo pipefail
jobs=${SLURM_SUBMIT_DIR:?"submit it with sbatch, from the repository"}/jobs # Slurm runs a copy of this file from another folder
source "$jobs/steps.sh"
source "$jobs/clusters/cpu.sh"

record "$OUT"
check
scaling strong "${SIZE:-8192}"
scaling weak "${SIZE:-8192}"
tables "$OUT/strong" "$OUT/weak"
