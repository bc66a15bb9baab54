"""Synthetic tasks: examples are generated, so the required skill is known exactly."""

from deltanet_jax.data.synthetic import mad
from deltanet_jax.data.synthetic.base import SyntheticTask
from deltanet_jax.data.synthetic.mqar import MQAR
from deltanet_jax.data.synthetic.regbench import RegBench
from deltanet_jax.data.synthetic.state_tracking import GROUPS, StateTracking

__all__ = ["GROUPS", "MQAR", "RegBench", "StateTracking", "SyntheticTask", "mad"]
