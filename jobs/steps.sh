# The steps of a job: look at the machine, train on from the newest checkpoint, sweep over rank counts. Sourced by the
# scripts beside it, after a file of clusters/ has defined `start RANKS COMMAND…` and RANKS. Capitals may be set before sbatch.
# Next: clusters/cuda.sh; `summa3d train --help`, `summa3d bench strong --help`, `summa3d gemm --help`.
# shellcheck shell=bash

# One small product on all ranks against a serial one: launcher, MPI, BLAS and (SUMMA3D_DEVICE=cuda) GPUs and transport at once.
check() {
    summa3d doctor
    if [[ ${SUMMA3D_DEVICE:-cpu} == cuda ]]; then
        BIND_SHOW=yes start "$RANKS" true
    fi
    start "$RANKS" summa3d gemm --m 1009 --n 997 --k 1013 --dtype float64 --check --json | accept
}

# Passes the line of `gemm --check --json` on; fails where the product is wrong or there is none.
accept() {
    python -c '
import json, sys
line = sys.stdin.read().splitlines()[-1]
print(line)
error = json.loads(line)["relative_error"]
sys.exit(0 if error < 1e-13 else f"the product is wrong: relative error {error}")'
}

# A checkpoint is complete or not there, so the time limit may fall anywhere: what is lost are the steps since the newest one.
# Choose CHECKPOINT_EVERY so that those are minutes. With --resume the same line starts a run and goes on with it.
train() {
    local settings=() part
    for part in ${GRID//,/ }; do
        settings+=(--set "grid.$part")
    done
    start "$RANKS" summa3d train "${CONFIG:-demo}" --run "${RUN:-runs/$SLURM_JOB_NAME}" --resume \
        --set "scheme=${SCHEME:-cuboid}" "${settings[@]}" --set "train.checkpoint_every=${CHECKPOINT_EVERY:-100}"
}

# Strong and weak scaling in one start each: ranks that a smaller count leaves over wait. For the host.
sweep() {
    local out=${OUT:-runs/scaling-$SLURM_JOB_ID} size=${SIZE:-8192} kind
    mkdir -p "$out"
    for kind in strong weak; do
        start "$RANKS" summa3d bench "$kind" --m "$size" --n "$size" --k "$size" --dtype "${DTYPE:-float32}" \
            --json "$out/$kind.json"
    done
    summa3d report --no-plots "$out/strong.json" "$out/weak.json"
}

# The same on GPUs: one start for each rank count, as each rank has a GPU of its own. A line of JSON for each, in two files.
sweep_devices() {
    local out=${OUT:-runs/scaling-$SLURM_JOB_ID} size=${SIZE:-16384} count grown
    mkdir -p "$out"
    for ((count = 1; count <= RANKS; count *= 2)); do
        grown=$(awk -v size="$size" -v count="$count" 'BEGIN { printf "%d", size * count ^ (1 / 3) + 0.5 }')
        product "$count" "$size" >>"$out/strong.jsonl"
        product "$count" "$grown" >>"$out/weak.jsonl"
    done
}

product() { start "$1" summa3d gemm --m "$2" --n "$2" --k "$2" --dtype "${DTYPE:-float32}" --json; }
