"""Tensor-parallel schemes: each is data, put on a grid by `scheme`."""
