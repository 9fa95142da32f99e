# A CUDA cluster under Slurm: its modules, what the environment says, how ranks are started. Sourced by cuda_*.sh.
# SITE marks what a site fills in; each may be set before sbatch instead.
# Next: ../bind.sh (cores and network card of a rank); ../steps.sh (what is started).
# shellcheck shell=bash

set +u # what modules and environments source may read unset variables
# shellcheck disable=SC2086 # several words
module load ${MODULES:-python cuda openmpi} # SITE: the MPI that mpi4py was built against
# shellcheck disable=SC1091
source "${VENV:-env}/bin/activate" # SITE: where summa3d was installed
set -u

export SUMMA3D_DEVICE=cuda
# auto: NCCL where each rank has a GPU of its own, else CUDA-aware MPI, else copies in pinned memory; doctor says which and why.
export SUMMA3D_TRANSPORT=${SUMMA3D_TRANSPORT:-auto}

GPUS=${SLURM_GPUS_ON_NODE:?"ask for GPUs: sbatch --gpus-per-node=…"}
RANKS=$((SLURM_JOB_NUM_NODES * GPUS))

# start RANKS COMMAND…: one rank per GPU, nodes filled in turn. Slurm binds nothing, so that every rank sees all GPUs and cores
# of its node and bind.sh chooses. One rank that fails ends all. SRUN_OPTIONS: SITE, as `--mpi=pmix` (`srun --mpi=list`).
start() {
    local ranks=$1
    shift
    # shellcheck disable=SC2086 # several words
    srun ${SRUN_OPTIONS:-} --nodes=$(((ranks + GPUS - 1) / GPUS)) --ntasks="$ranks" --ntasks-per-node="$GPUS" \
        --distribution=block --cpu-bind=none --gpu-bind=none --kill-on-bad-exit=1 "$jobs/bind.sh" "$@"
}
