"""Blocks and whole models of every family."""
