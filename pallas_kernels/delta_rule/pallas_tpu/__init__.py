"""implementation="pallas_tpu": the delta rule for TPUs, in Pallas (Mosaic lowering)."""
