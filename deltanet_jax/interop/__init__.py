"""Interoperability: public checkpoints of other libraries."""

from deltanet_jax.interop.checkpoint_files import checkpoint_folder
from deltanet_jax.interop.fla import fla_tensors, load_fla, save_fla

__all__ = ["checkpoint_folder", "fla_tensors", "load_fla", "save_fla"]
