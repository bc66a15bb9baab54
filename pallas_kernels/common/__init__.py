"""Code shared by all kernels.

autodiff        custom backward passes in plain JAX that keep forward mode, or reject it
differentiable  kernels as JAX operations: reverse mode of any order, `vmap` folded into the batch
bf16            float32 matmuls as sums of bfloat16 matmuls
gpu             target GPU at trace time, launch of a Pallas-Triton kernel
measured_tiles  cache of the GPU tile sizes measured by `experiments.device_check`
platform        clear error when a kernel is compiled for another platform
tiling          rounding, padding and TPU hardware limits
"""
