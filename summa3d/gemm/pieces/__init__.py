"""Products in pieces: what is exchanged, multiplied and sent in which order, as data; and what executes it."""
