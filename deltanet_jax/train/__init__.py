"""Training: one compiled step, a loop around it, checkpoints, and loading what they left."""

from deltanet_jax.train.evaluated import Evaluated, Evaluator
from deltanet_jax.train.initial import Initial
from deltanet_jax.train.loop import DivergenceError, check_start, train
from deltanet_jax.train.stopping import PreemptionError
from deltanet_jax.train.stored import saved_steps
from deltanet_jax.train.trained import Trained, load_trained, save_weights

__all__ = [
  "DivergenceError",
  "Evaluated",
  "Evaluator",
  "Initial",
  "PreemptionError",
  "Trained",
  "check_start",
  "load_trained",
  "save_weights",
  "saved_steps",
  "train",
]
