"""implementation="pallas_tpu": causal attention for TPUs, in Pallas (Mosaic lowering)."""
