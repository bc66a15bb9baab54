"""The generalised delta rule, whose transition is diagonal plus low rank."""

from deltanet_jax.ops.dplr.api import dplr, dplr_step

__all__ = ["dplr", "dplr_step"]
