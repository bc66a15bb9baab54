"""Helpers that the kernels share: autodiff rules, bfloat16 splitting, tiling, platforms."""
