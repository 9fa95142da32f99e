#!/bin/bash
#SBATCH --job-name=cuda_scaling
#SBATCH --nodes=1
#SBATCH --gpus-per-node=4
#SBATCH --exclusive
#SBATCH --time=00:30:00
# Strong and weak scaling of a product on GPUs, on 1, 2, 4, … ranks. Submit it from the repository:
#   sbatch -A ACCOUNT -p PARTITION --nodes=4 jobs/cuda_scaling.sh
# SIZE (16384), DTYPE (float32) and OUT may be set in the environment. clusters/cuda.sh holds the settings of a site.
set -euo pipefail
jobs=${SLURM_SUBMIT_DIR:?"submit it with sbatch, from the repository"}/jobs # Slurm runs a copy of this file from another folder
source "$jobs/steps.sh"
source "$jobs/clusters/cuda.sh"

record "$OUT"
check
scaling strong "${SIZE:-16384}"
scaling weak "${SIZE:-16384}"
tables "$OUT/strong" "$OUT/weak"
