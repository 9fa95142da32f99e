"""Sweeps: points named by their content, measured on ranks, resumed, collected and shown."""
