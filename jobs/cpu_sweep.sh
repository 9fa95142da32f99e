#!/bin/bash
#SBATCH --job-name=cpu_sweep
#SBATCH --array=0-3
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --exclusive
#SBATCH --time=02:00:00
# Training on CPUs once per value of a setting, as the tasks of a job array. Task i takes value i, and trains in runs/cpu_sweep-i.
# Submit it from the repository:
#   sbatch -A ACCOUNT -p PARTITION jobs/cpu_sweep.sh
# Other values, one task for each:
#   KEY=train.seed VALUES="1 2 3" sbatch --array=0-2 jobs/cpu_sweep.sh
# A task that met the time limit continues when it is submitted again, alone: sbatch --array=2 jobs/cpu_sweep.sh
# CONFIG, SCHEME, CHECKPOINT_EVERY and SET (steps.sh) may be set in the environment; clusters/cpu.sh holds a site's settings.
set -euo pipefail
jobs=${SLURM_SUBMIT_DIR:?"submit it with sbatch, from the repository"}/jobs # Slurm runs a copy of this file from another folder
source "$jobs/steps.sh"
source "$jobs/clusters/cpu.sh"

GRID=${GRID:-x=2,y=2,z=1}
task=${SLURM_ARRAY_TASK_ID:?"submit it as an array: sbatch --array=0-3"}
read -ra values <<<"${VALUES:-5e-4 1e-3 2e-3 4e-3}"
SET="${SET:-} ${KEY:-train.learning_rate}=${values[task]:?"there is no value for task $task: VALUES has ${#values[@]}"}"
record "$RUN"
check
train
