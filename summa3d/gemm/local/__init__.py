"""One product on one rank: by numpy, a BLAS, torch or cuBLAS."""
