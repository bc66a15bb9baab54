"""Training: a compiled update, the loop, checkpoints, and loading trained models."""

from deltanet_jax.eval.evaluation import EvalContext, Evaluator
from deltanet_jax.train.checkpoint_reader import saved_steps
from deltanet_jax.train.init_from import InitFrom
from deltanet_jax.train.load import Trained, load_trained, save_weights
from deltanet_jax.train.loggers import JsonLines, Logger, TensorBoard, WandB
from deltanet_jax.train.loop import DivergenceError, check_start, train
from deltanet_jax.train.preemption import PreemptionError
from deltanet_jax.train.step import Trainer, make_trainer

__all__ = [
  "DivergenceError",
  "EvalContext",
  "Evaluator",
  "InitFrom",
  "JsonLines",
  "Logger",
  "PreemptionError",
  "TensorBoard",
  "Trained",
  "Trainer",
  "WandB",
  "check_start",
  "load_trained",
  "make_trainer",
  "save_weights",
  "saved_steps",
  "train",
]

# Names before version 0.2.
Evaluated, Initial = EvalContext, InitFrom
