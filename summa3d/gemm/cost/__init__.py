"""The predicted cost of a product: words and messages by rank and on average, seconds, and the choice of an algorithm."""
