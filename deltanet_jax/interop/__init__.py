"""Checkpoints of other libraries."""

from deltanet_jax.interop.fla import fla_tensors, load_fla, save_fla

__all__ = ["fla_tensors", "load_fla", "save_fla"]
