# Settings of TACC Longhorn: Power9 (ppc64le), 4 V100 per node, Spectrum MPI, ranks started by ibrun. Sourced by longhorn_*.sh.
# SITE marks settings that could not be verified without the machine, or that belong to the user; each of them may be set in the
# environment of sbatch instead.
# shellcheck shell=bash disable=SC2034,SC2154 # RANKS is for steps.sh, jobs is of the job script

# Jobs run on $SCRATCH. x86 wheels and images do not run on ppc64le: CuPy and PyTorch come from a conda channel that builds for
# ppc64le, mpi4py is built from source against the loaded MPI.
set +u # files that modules and environments source may read unset variables
# shellcheck disable=SC2086 # several words
load_modules ${MODULES-conda spectrum_mpi} # SITE: `module avail` on a compute node names them; none with MODULES=
conda activate "${ENVIRONMENT:-summa3d}" # SITE: an environment with Python ≥ 3.10
set -u

export SUMMA3D_DEVICE=cuda
# auto selects NCCL, as each rank has its own GPU. SUMMA3D_TRANSPORT=cuda-aware needs Spectrum MPI to read device pointers, which
# it does only if its mpirun gets the option -gpu; how ibrun passes this option is SITE.
export SUMMA3D_TRANSPORT=${SUMMA3D_TRANSPORT:-auto}

GPUS=4
RANKS=$((SLURM_JOB_NUM_NODES * GPUS))

# start RANKS COMMAND…: one rank per GPU. ibrun fills nodes by the tasks per node of sbatch, and starts the MPI's own launcher,
# whose variables give bind.sh the rank in the node.
start() {
    local ranks=$1
    shift
    ibrun -n "$ranks" "$jobs/bind.sh" "$@"
}
