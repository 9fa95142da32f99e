"""Job scripts for Slurm: one generator, the steps that it writes into each, and sites as data."""
