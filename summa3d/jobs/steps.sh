# The steps of a job: record what runs, check the machine, train or continue a run, measure scaling. Below them are the site's
# settings, which define RANKS and `start RANKS COMMAND…`, and then what this job does. Variables in capitals may be set in the
# environment of sbatch.
# shellcheck shell=bash

# No two jobs may share the folder of a training run, so that each task of an array has its own. cpu_sweep.sh names it by value.
RUN=${RUN:-runs/$SLURM_JOB_NAME}${SLURM_ARRAY_TASK_ID:+-$SLURM_ARRAY_TASK_ID}
OUT=${OUT:-runs/scaling-$SLURM_JOB_ID} # of strong and weak scaling

# Asked to end (TERM), this script goes on until its ranks have saved; what is not started yet is not started any more.
asked=
trap 'asked=yes && echo "the job is asked to end"' TERM

stop() {
    echo "$SLURM_JOB_NAME: $*" >&2
    exit 1
}

# activate_venv: the environment VENV; where it is not set, env or .venv of this folder, or the summa3d that is on PATH.
activate_venv() {
    local place
    for place in ${VENV:+"$VENV"} env .venv; do
        if [[ -e $place/bin/activate ]]; then
            VENV=$place
            # shellcheck disable=SC1091
            source "$VENV/bin/activate"
            return
        fi
        [[ $place != "${VENV:-}" ]] || stop "no $VENV/bin/activate in $PWD: set VENV=FOLDER, where summa3d is installed."
    done
    command -v summa3d >/dev/null || stop "no summa3d on PATH, and no .venv/bin/activate in $PWD: set VENV=FOLDER, where it is."
}

# load_modules NAME…: nothing to do without a name. Where the machine has no `module` at all, the job says so and goes on.
load_modules() {
    (($#)) || return 0
    if ! command -v module >/dev/null; then
        echo "no command 'module' on this machine: did not load $*. MODULES= loads none." >&2
        return 0
    fi
    module load "$@"
}

# The variables that `record` writes. A list of what may be shown, because others hold secrets, such as SLURM_JWT.
RECORDED='SLURM_(JOB_[A-Z_]+|ARRAY_[A-Z_]+|N[A-Z]+|[A-Z]+_PER_[A-Z]+|[A-Z]+_ON_NODE|MPI_TYPE|RESTART_COUNT)'
RECORDED+='|SUMMA3D_[A-Z_]+|[A-Z]+_NUM_THREADS|RANKS|MODULES|LOADEDMODULES|VENV|SRUN_OPTIONS'
RECORDED+='|CONFIG|GRID|SCHEME|CHECKPOINT_EVERY|SET|KEY|VALUES|SIZE|DTYPE'

# record FOLDER: the output of the job goes on in FOLDER/job-ID.out. Beside it are the submitted script (.sh), and what it runs
# with (.txt): time, commit, nodes, settings.
record() {
    local file=$1/job-$SLURM_JOB_ID name
    mkdir -p "$1"
    echo "output: $file.out"
    exec >>"$file.out" 2>&1
    cp "$0" "$file.sh"
    if declare -F write_bind >/dev/null; then
        BIND=$file.bind
        write_bind >"$BIND"
        chmod +x "$BIND"
    fi
    {
        echo "time=$(date +%Y-%m-%dT%H:%M:%S%z)"
        name=$(git -C "$SLURM_SUBMIT_DIR" describe --always --abbrev=40 --exclude '*' --dirty 2>/dev/null) || name=unknown
        echo "commit=$name"
        for name in $(compgen -v | grep -xE "$RECORDED"); do
            printf '%s=%s\n' "$name" "${!name}"
        done
    } >"$file.txt"
}

# Compares a small product on all ranks with a serial product, which tests launcher, MPI, BLAS and, with SUMMA3D_DEVICE=cuda,
# GPUs and transport. A job that is asked to end meanwhile goes back into the queue: ranks that TERM ended have the status 143.
# TERM also ends the ranks beside one that failed (--kill-on-bad-exit), which says so: such a job would fail again.
check() {
    local found status=0
    # shellcheck disable=SC2016 # the shell of a rank reads these
    local says='"$@" || { status=$?; [ $status = 143 ] || echo "a rank failed: status $status"; exit $status; }'
    summa3d doctor
    if [[ ${SUMMA3D_DEVICE:-cpu} == cuda ]]; then
        BIND_SHOW=yes start "$RANKS" true
    fi
    found=$(start "$RANKS" sh -c "$says" sh summa3d gemm --m 1009 --n 997 --k 1013 --dtype float64 --check --json) || status=$?
    if [[ $asked ]] || { ((status == 143)) && [[ $found != *"a rank failed"* ]]; }; then
        requeue
        exit 75
    fi
    accept <<<"$found"
    return "$status"
}

# What the Pythons of these steps begin with: they import nothing from the folder of the job.
without_folder='import sys; sys.path[:] = [place for place in sys.path if place]
'

# Prints the JSON line of `gemm --check --json`; fails where the product is wrong or there is no line.
accept() {
    python -c "$without_folder"'
import json, sys
lines = [line for line in sys.stdin.read().splitlines() if line.startswith("{")]
if not lines:
    from summa3d.launcher import runtime, slurm
    vendor = runtime.loaded_runtime().vendor
    sys.exit("the ranks computed nothing, see above. " + slurm.advice(vendor, slurm.default_type(), slurm.offered_types()))
print(lines[-1])
error = json.loads(lines[-1])["relative_error"]
sys.exit(0 if error < 1e-13 else f"the product is wrong: relative error {error}")'
}

# Two minutes before the time limit (--signal=TERM@120), and when it is preempted, the run is asked to end: it saves after its
# step, ends with status 75, and the job goes back into the queue. Checkpoints are published atomically, so that a job may also
# be killed at any time; then the steps since the newest checkpoint are lost. Choose CHECKPOINT_EVERY so that these take
# minutes. With --start-or-resume, the same command starts a run and continues it. SET holds more settings:
# SET="train.steps=1000 train.seed=2".
train() {
    local settings=() part status=0 axes more
    read -ra axes <<<"${GRID//,/ }"
    for part in "${axes[@]}"; do
        settings+=(--set "grid.$part")
    done
    read -rd '' -a more <<<"${SET:-}" || true # words, of which none is a pattern of files
    for part in "${more[@]}"; do
        settings+=(--set "$part")
    done
    # TERM waits for the ranks until they have imported, and hear it; with an env before coreutils 8.31 it passes without effect
    local held=(env --block-signal=TERM)
    "${held[@]}" true 2>/dev/null || held=(sh -c 'trap "" TERM && exec "$@"' sh)
    start "$RANKS" "${held[@]}" summa3d train "${CONFIG:-demo}" --run "$RUN" --start-or-resume \
        --set "scheme=${SCHEME:-cuboid}" "${settings[@]}" --set "train.checkpoint_every=${CHECKPOINT_EVERY:-100}" || status=$?
    if ((status == 143)); then status=75; fi # TERM ended a rank before it listened; the newest checkpoint is what there is
    if ((status == 75)); then
        requeue
    fi
    return "$status"
}

# requeue: the job, unless it is being cancelled or has met its time limit.
requeue() {
    local state
    state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)
    if [[ $state == RUNNING ]]; then
        echo "the run has saved: requeued"
        scontrol requeue "$SLURM_JOB_ID"
    else
        echo "the run has saved; the job is ${state:-gone}, and is not requeued: submit it again to continue" >&2
    fi
}

# rank_counts: 1, 2, 4, … and RANKS.
rank_counts() {
    local count
    for ((count = 1; count < RANKS; count *= 2)); do echo "$count"; done
    echo "$RANKS"
}

# scaling NAME SIZE: measures the sweep product-NAME in OUT/NAME. On GPUs in one job step per rank count, since each rank has its
# own GPU; on the host in one step, in which smaller rank counts leave the other ranks waiting. The same command continues a
# sweep in a folder OUT that a job before it has left.
scaling() {
    local count counts
    counts=$(rank_counts)
    set -- summa3d sweep run "product-$1" --dir "$OUT/$1" --set "ranks=${counts//$'\n'/,}" \
        --set "m=$2" --set "n=$2" --set "k=$2" --set "dtype=${DTYPE:-float32}"
    if [[ ${SUMMA3D_DEVICE:-cpu} == cuda ]]; then
        for count in $counts; do start "$count" "$@"; done
    else
        start "$RANKS" "$@" --fewer
    fi
}

# Tables of sweeps, printed and beside them, and plots where matplotlib is installed.
tables() {
    local form=(--format markdown --format csv)
    local drawn='import importlib.util as u, sys; sys.exit(None if u.find_spec("matplotlib") else "no plots without matplotlib")'
    if python -c "$without_folder$drawn"; then form+=(--format png --format pdf); else form+=(--no-plots); fi
    summa3d report "${form[@]}" "$@" >"$OUT/report.txt"
    cat "$OUT/report.txt"
}
