"""What is done with the elements of distributed matrices: arithmetic, sums, norms, parts, random numbers."""
