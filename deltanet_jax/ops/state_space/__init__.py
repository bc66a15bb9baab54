"""Diagonal state space of S4D: recurrent, and as a long convolution."""

from deltanet_jax.ops.state_space.api import state_space

__all__ = ["state_space"]
