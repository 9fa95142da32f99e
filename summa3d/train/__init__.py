# Training: configuration, data, optimizer, checkpoints, metrics and the loop that joins them.
# Imports comm, layout and nn; never cli.
# Next: config.py, then loop.py, which reads as the story of a run.
