"""implementation="pallas_gpu": the delta rule for NVIDIA GPUs, in Pallas (Triton lowering)."""
