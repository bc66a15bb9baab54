"""The paper's design for NVIDIA GPUs: a kernel for the UT transform of all chunks, then a scan.

The kernel is in Pallas, which `delta_rule_gpu(fused=False)` takes, and once more in Triton proper,
which is implementation="triton".
"""
