"""Measured rows of papers and pages, and what is made of them. Not installed: it may use the package's internals."""
