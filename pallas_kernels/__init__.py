"""Pallas kernels of the delta rule for GPU and TPU; imports jax and nothing else."""
