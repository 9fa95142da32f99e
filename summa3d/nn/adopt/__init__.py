"""Modules of others on a grid: Transformers' models by their own plans, and any module by two words a linear layer."""
