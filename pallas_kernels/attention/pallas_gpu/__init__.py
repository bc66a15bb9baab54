"""Causal attention kernels for NVIDIA GPUs, in Pallas (Triton lowering)."""
