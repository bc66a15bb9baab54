"""implementation="pallas_gpu": causal attention for NVIDIA GPUs, in Pallas (Triton lowering)."""
