#!/bin/bash
#SBATCH --job-name=cuda_scaling
#SBATCH --nodes=1
#SBATCH --gpus-per-node=4
#SBATCH --exclusive
#SBATCH --time=00:30:00
# Strong and weak scaling of a product on GPUs, 1, 2, 4, … ranks: sbatch -A ACCOUNT -p PARTITION --nodes=4 jobs/cuda_scaling.sh
# from the repository. SIZE (16384), DTYPE (float32) and OUT may be set before.
# Next: steps.sh, clusters/cuda.sh (what a site fills in).
set -euo pipefail
jobs=${SLURM_SUBMIT_DIR:?"submit it with sbatch, from the repository"}/jobs # Slurm runs a copy of this file, elsewhere
source "$jobs/clusters/cuda.sh"
source "$jobs/steps.sh"

check
sweep_devices
