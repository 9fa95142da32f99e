"""Corpora, token files, and what a family learns from them."""
