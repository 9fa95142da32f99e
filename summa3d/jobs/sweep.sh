# Training once per value of a setting, as the tasks of a job array. Task i takes value i, and trains in a folder named
# by KEY and the value, as runs/NAME-train.learning_rate-5e-4. Submit it from any folder; runs/ is made there:
#   sbatch -A ACCOUNT -p PARTITION FILE
# Other values, one task for each:
#   KEY=train.seed VALUES="1 2 3" sbatch --array=0-2 FILE
# Before its time limit a task saves and goes back into the queue. One that ended otherwise continues when it is submitted again,
# alone, with the same KEY and VALUES:
#   KEY=train.seed VALUES="1 2 3" sbatch --array=2 FILE
# With another CONFIG, SCHEME, GRID or SET, name another folder too: RUN=runs/wide.
# CONFIG, SCHEME, CHECKPOINT_EVERY and SET may be set in the environment.
[[ ${SLURM_ARRAY_TASK_ID:-} ]] || stop "submit it as an array: sbatch --array=0-3"
task=$SLURM_ARRAY_TASK_ID KEY=${KEY:-train.learning_rate} VALUES=${VALUES:-5e-4 1e-3 2e-3 4e-3}
read -ra values <<<"$VALUES"
((task < ${#values[@]})) || stop "there is no value for task $task: VALUES has ${#values[@]} (--array=0-$((${#values[@]} - 1)))"
value=${values[task]}
SET="${SET:-} $KEY=$value"
RUN=${RUN%-"$task"}-$KEY-${value//\//_} # a folder by task number would be continued by a sweep over another key
record "$RUN"
check
train
