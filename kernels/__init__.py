"""Element-wise and row-wise arithmetic of the layers: plain torch on the host, fused CUDA kernels on a device."""
