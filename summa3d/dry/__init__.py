"""The library's own code run without memory and without ranks: what any rank of any grid computes, moves and holds."""
