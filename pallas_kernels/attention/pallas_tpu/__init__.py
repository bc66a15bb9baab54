"""Causal attention kernels for TPU, in Pallas (Mosaic lowering)."""
