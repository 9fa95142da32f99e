# TACC Longhorn: Power9 (ppc64le), 4 V100 a node, Spectrum MPI, ranks started by ibrun. Sourced by longhorn_*.sh.
# SITE marks what could not be verified away from the machine, or is the user's own; each may be set before sbatch instead.
# Next: ../bind.sh (cores and network card of a rank); ../steps.sh (what is started).
# shellcheck shell=bash

# Jobs run on $SCRATCH there. x86 wheels and images do not run on ppc64le: CuPy and PyTorch come from a conda channel that
# builds for it, mpi4py from source against the loaded MPI (../../README.md, "On a cluster").
set +u # what modules and environments source may read unset variables
# shellcheck disable=SC2086 # several words
module load ${MODULES:-conda spectrum_mpi} # SITE: `module avail` on a compute node names them
conda activate "${ENVIRONMENT:-summa3d}" # SITE: an environment with Python ≥ 3.10
set -u

export SUMMA3D_DEVICE=cuda
# auto takes NCCL here, one GPU per rank. Spectrum MPI reads device pointers only where its mpirun was given -gpu; how ibrun
# passes that on is SITE, and only SUMMA3D_TRANSPORT=cuda-aware needs it.
export SUMMA3D_TRANSPORT=${SUMMA3D_TRANSPORT:-auto}

GPUS=4
RANKS=$((SLURM_JOB_NUM_NODES * GPUS))

# start RANKS COMMAND…: one rank per GPU; ibrun fills nodes by the tasks per node that sbatch was given, and starts the MPI's
# own launcher, from whose variables bind.sh reads the rank in the node.
start() {
    local ranks=$1
    shift
    ibrun -n "$ranks" "$jobs/bind.sh" "$@"
}
