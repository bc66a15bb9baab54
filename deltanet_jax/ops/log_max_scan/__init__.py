"""Exponentially weighted averages of RWKV-4 (WKV): recurrent and chunkwise."""

from deltanet_jax.ops.log_max_scan.api import empty_log_max_state, log_max_scan

__all__ = ["empty_log_max_state", "log_max_scan"]
