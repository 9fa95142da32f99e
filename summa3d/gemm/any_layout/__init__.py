"""Products of operands in any layouts: plans by compute layouts, their search, and what executes them."""
