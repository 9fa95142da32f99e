"""Tables of papers beside predictions: rows, the programs that were measured, fits, claims."""
