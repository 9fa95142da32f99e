# A cluster without GPUs under Slurm: its modules, what the environment says, how ranks are started. Sourced by cpu_*.sh.
# SITE marks what a site fills in; each may be set before sbatch instead.
# Next: ../steps.sh (what is started).
# shellcheck shell=bash

set +u # what modules and environments source may read unset variables
# shellcheck disable=SC2086 # several words
module load ${MODULES:-python openmpi} # SITE: the MPI that mpi4py was built against
# shellcheck disable=SC1091
source "${VENV:-env}/bin/activate" # SITE: where summa3d was installed
set -u

THREADS=${SLURM_CPUS_PER_TASK:?"say how many cores a rank has: sbatch --cpus-per-task=…"}
RANKS=${SLURM_NTASKS:?"say how many ranks a node has: sbatch --ntasks-per-node=…"}
export OMP_NUM_THREADS=$THREADS OPENBLAS_NUM_THREADS=$THREADS MKL_NUM_THREADS=$THREADS # a rank's BLAS has its cores, not more

# start RANKS COMMAND…: nodes filled in turn, each rank on cores of its own. srun does not take --cpus-per-task over from sbatch
# since Slurm 22.05, so it stands here. SRUN_OPTIONS: SITE, as `--mpi=pmix` (`srun --mpi=list`).
start() {
    local ranks=$1
    shift
    # shellcheck disable=SC2086 # several words
    srun ${SRUN_OPTIONS:-} --ntasks="$ranks" --cpus-per-task="$THREADS" --distribution=block:block --cpu-bind=cores \
        --kill-on-bad-exit=1 "$@"
}
