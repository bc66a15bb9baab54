"""Selective state space recurrence of Mamba: recurrent and chunkwise."""

from deltanet_jax.ops.selective_scan.api import selective_scan

__all__ = ["selective_scan"]
