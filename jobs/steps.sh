# The steps of a job: check the machine, train or continue a run, sweep over rank counts. The job scripts source this file
# after a file of clusters/ has defined RANKS and `start RANKS COMMAND…`. Variables in capitals may be set in the environment of
# sbatch.
# shellcheck shell=bash

# Compares a small product on all ranks with a serial product, which tests launcher, MPI, BLAS and, with SUMMA3D_DEVICE=cuda,
# GPUs and transport.
check() {
    summa3d doctor
    if [[ ${SUMMA3D_DEVICE:-cpu} == cuda ]]; then
        BIND_SHOW=yes start "$RANKS" true
    fi
    start "$RANKS" summa3d gemm --m 1009 --n 997 --k 1013 --dtype float64 --check --json | accept
}

# Prints the JSON line of `gemm --check --json`; fails where the product is wrong or there is no line.
accept() {
    python -c '
import json, sys
line = sys.stdin.read().splitlines()[-1]
print(line)
error = json.loads(line)["relative_error"]
sys.exit(0 if error < 1e-13 else f"the product is wrong: relative error {error}")'
}

# Checkpoints are published atomically, so that the time limit may stop a job at any time; the steps since the newest checkpoint
# are lost. Choose CHECKPOINT_EVERY so that these take minutes. With --resume, the same command starts a run and continues it.
train() {
    local settings=() part
    for part in ${GRID//,/ }; do
        settings+=(--set "grid.$part")
    done
    start "$RANKS" summa3d train "${CONFIG:-demo}" --run "${RUN:-runs/$SLURM_JOB_NAME}" --resume \
        --set "scheme=${SCHEME:-cuboid}" "${settings[@]}" --set "train.checkpoint_every=${CHECKPOINT_EVERY:-100}"
}

# Strong and weak scaling on the host, in one job step each: smaller rank counts leave the other ranks waiting.
sweep() {
    local out=${OUT:-runs/scaling-$SLURM_JOB_ID} size=${SIZE:-8192} kind
    mkdir -p "$out"
    for kind in strong weak; do
        start "$RANKS" summa3d bench "$kind" --m "$size" --n "$size" --k "$size" --dtype "${DTYPE:-float32}" \
            --json "$out/$kind.json"
    done
    summa3d report --no-plots "$out/strong.json" "$out/weak.json"
}

# Strong and weak scaling on GPUs, in one job step per rank count, since each rank has its own GPU. Writes two files with one
# JSON line per rank count.
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
