# Settings of a cluster without GPUs under Slurm: modules, environment, and how ranks are started. Sourced by cpu_*.sh.
# SITE marks settings that a site must fill in; each of them may be set in the environment of sbatch instead.
# shellcheck shell=bash disable=SC2034,SC2154 # RANKS is for steps.sh, jobs is of the job script

set +u # files that modules and environments source may read unset variables
# shellcheck disable=SC2086 # several words
load_modules ${MODULES-python openmpi} # SITE: the MPI that mpi4py was built against; none with MODULES=
activate_venv # SITE: VENV, where summa3d was installed; env or .venv where it is not set
set -u

[[ ${SLURM_CPUS_PER_TASK:-} ]] || stop "say how many cores a rank has: sbatch --cpus-per-task=…"
THREADS=$SLURM_CPUS_PER_TASK
[[ ${SLURM_NTASKS:-} ]] || stop "say how many ranks a node has: sbatch --ntasks-per-node=…"
RANKS=$SLURM_NTASKS
export OMP_NUM_THREADS=$THREADS OPENBLAS_NUM_THREADS=$THREADS MKL_NUM_THREADS=$THREADS # BLAS threads = cores of a rank

# start RANKS COMMAND…: one node filled after the other, each rank bound to its own cores. Since Slurm 22.05, srun does not
# inherit --cpus-per-task from sbatch. SRUN_OPTIONS: SITE. SLURM_MPI_TYPE=pmix, which srun reads, stands for --mpi=pmix.
start() {
    local ranks=$1
    shift
    # shellcheck disable=SC2086 # several words
    srun ${SRUN_OPTIONS:-} --ntasks="$ranks" --cpus-per-task="$THREADS" --distribution=block:block --cpu-bind=cores \
        --kill-on-bad-exit=1 "$@"
}
