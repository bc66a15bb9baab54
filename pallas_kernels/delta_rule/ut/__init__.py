"""The paper's design for NVIDIA GPUs: one kernel for the UT transform of all chunks, then a scan.

The kernel is written in Pallas (`delta_rule_gpu(fused=False)`) and in Triton (`delta_rule_triton`).
"""
