"""The search for a plan: which scheme, grid, pipeline, placement and micro-batch trains a model fastest on a cluster."""
