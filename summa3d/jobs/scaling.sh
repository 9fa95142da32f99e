# Strong and weak scaling of a product, on 1, 2, 4, … ranks. Submit it from any folder; runs/ is made there:
#   sbatch -A ACCOUNT -p PARTITION FILE
# SIZE (8192), DTYPE (float32) and OUT may be set in the environment.
record "$OUT"
check
scaling strong "${SIZE:-8192}"
scaling weak "${SIZE:-8192}"
tables "$OUT/strong" "$OUT/weak"
