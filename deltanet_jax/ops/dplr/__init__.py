"""Recurrence with a diagonal plus low rank (DPLR) transition; generalizes the delta rule."""

from deltanet_jax.ops.dplr.api import DPLR, dplr, dplr_step

__all__ = ["DPLR", "dplr", "dplr_step"]
