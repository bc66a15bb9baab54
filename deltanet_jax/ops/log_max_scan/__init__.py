"""Averages with exponential weights, RWKV-4's: recurrent and chunkwise."""

from deltanet_jax.ops.log_max_scan.api import empty_log_max_state, log_max_scan

__all__ = ["empty_log_max_state", "log_max_scan"]
