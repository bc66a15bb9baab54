"""Interoperability: public checkpoints of other libraries."""

from deltanet_jax.interop.fla import fla_tensors, load_fla, save_fla
from deltanet_jax.interop.fla_files import checkpoint_folder

__all__ = ["checkpoint_folder", "fla_tensors", "load_fla", "save_fla"]
