"""What a product costs before it runs, rank by rank and on average, in seconds; and the choice of an algorithm by that."""
