"""Dry runs: the library's own code without data, to count what any rank of any grid computes, moves and holds."""
