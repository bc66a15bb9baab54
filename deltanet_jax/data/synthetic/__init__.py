"""Tasks that are drawn, not read: what they ask of a model is known exactly."""

from deltanet_jax.data.synthetic.state_tracking import GROUPS, StateTracking

__all__ = ["GROUPS", "StateTracking"]
