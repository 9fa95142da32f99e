"""Transformer layers, each written once for every scheme."""
