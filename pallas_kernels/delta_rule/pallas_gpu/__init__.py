"""Delta rule and linear attention kernels for NVIDIA GPUs, in Pallas (Triton lowering)."""
