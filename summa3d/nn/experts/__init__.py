"""Mixtures of experts: the router, where tokens go, and the layer of experts."""
