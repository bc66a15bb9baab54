"""The diagonal state space of S4D: recurrent and by a long convolution."""

from deltanet_jax.ops.state_space.api import state_space

__all__ = ["state_space"]
