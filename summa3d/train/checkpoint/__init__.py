"""Checkpoints of global tensors, and their exchange with Transformers folders."""
