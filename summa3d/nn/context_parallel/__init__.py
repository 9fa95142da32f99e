"""Context parallelism: which positions of a sequence each rank of axis cp holds, and attention over all of them."""
