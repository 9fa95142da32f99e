# Training, checked first. Submit it from any folder; runs/ is made there:
#   sbatch -A ACCOUNT -p PARTITION FILE
# Another grid (x·y·z is the number of ranks):
#   GRID=x=4,y=2,z=2 sbatch --nodes=4 … FILE
# Before its time limit the job saves and goes back into the queue. A job that ended otherwise continues when it is submitted
# again. This second job starts only if the first one did not finish:
#   sbatch --dependency=afternotok:JOBID --kill-on-invalid-dep=yes FILE
# CONFIG, RUN, SCHEME, CHECKPOINT_EVERY and SET may be set in the environment.
record "$RUN"
check
train
