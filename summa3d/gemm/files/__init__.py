"""Distributed matrices in files, .npy, raw and HDF5: each rank reads and writes its own part, and none sends it to another."""
