"""Benchmarks that the command line runs: products and blocks side by side, their tables and plots."""
