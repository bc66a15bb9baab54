"""Delta rule and linear attention kernels for TPU, in Pallas (Mosaic lowering)."""
