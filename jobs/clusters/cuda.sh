# Settings of a CUDA cluster under Slurm: modules, environment, and how ranks are started. Sourced by cuda_*.sh.
# SITE marks settings that a site must fill in; each of them may be set in the environment of sbatch instead.
# shellcheck shell=bash disable=SC2034,SC2154 # RANKS is for steps.sh, jobs is of the job script

set +u # files that modules and environments source may read unset variables
# shellcheck disable=SC2086 # several words
load_modules ${MODULES-python cuda openmpi} # SITE: the MPI that mpi4py was built against; none with MODULES=
activate_venv # SITE: VENV, where summa3d was installed; env or .venv where it is not set
set -u

export SUMMA3D_DEVICE=cuda
# auto: NCCL where each rank has its own GPU, else CUDA-aware MPI, else copies through pinned memory. `summa3d doctor` reports
# the choice and its reason.
export SUMMA3D_TRANSPORT=${SUMMA3D_TRANSPORT:-auto}

[[ ${SLURM_GPUS_ON_NODE:-} ]] || stop "ask for GPUs: sbatch --gpus-per-node=…"
GPUS=$SLURM_GPUS_ON_NODE
RANKS=$((SLURM_JOB_NUM_NODES * GPUS))

# start RANKS COMMAND…: one rank per GPU, one node filled after the other. Slurm does not bind, so that every rank sees all GPUs
# and cores of its node, and bind.sh binds. A failing rank ends the job step. SRUN_OPTIONS: SITE.
# SLURM_MPI_TYPE=pmix, which srun reads, stands for --mpi=pmix.
start() {
    local ranks=$1
    shift
    # shellcheck disable=SC2086 # several words
    srun ${SRUN_OPTIONS:-} --nodes=$(((ranks + GPUS - 1) / GPUS)) --ntasks="$ranks" --ntasks-per-node="$GPUS" \
        --distribution=block --cpu-bind=none --gpu-bind=none --kill-on-bad-exit=1 "$jobs/bind.sh" "$@"
}
