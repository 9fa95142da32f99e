"""Training: configuration, data, optimizer, checkpoints, metrics, and the loop that uses them."""
