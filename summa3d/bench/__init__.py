"""Benchmarks of the command line: products and transformer blocks side by side, with tables and plots."""
