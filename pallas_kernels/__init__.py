"""Pallas kernels for TPU and NVIDIA GPU: delta rule, linear attention, attention and epilogues.

The package imports jax only (`delta_rule/ut/triton_kernel.py` also imports jax-triton). Its
`__init__` modules import Pallas lazily, so that the input checks are cheap to import.
"""
