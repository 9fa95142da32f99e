"""Closed forms of what models move and hold: the oracle that the dry run is compared with."""
