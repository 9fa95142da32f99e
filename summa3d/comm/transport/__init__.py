"""Transports of collectives: host MPI, node memory, NCCL, CUDA-aware MPI and pinned copies, and their selection."""
