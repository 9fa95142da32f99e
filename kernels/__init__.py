# Element-wise and row-wise arithmetic of the layers, one family per function; installed as summa3d.kernels.
# reference.py holds each in plain torch: the CPU path, and the oracle for a device kernel of the same name.
# Next: reference.py.
