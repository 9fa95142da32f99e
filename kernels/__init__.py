# Element-wise and row-wise arithmetic of the layers, one family per function; installed as summa3d.kernels.
# dispatch.py is what layers call: plain torch (reference.py) for tensors on the CPU, the fused kernels (*.cu) on a CUDA device.
# Next: dispatch.py; reference.py (what each computes), rows.py and elements.py (how its kernel is started), load.py.
