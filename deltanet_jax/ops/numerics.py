"""Errors, and outputs with every gradient of an operator: for tests and benchmarks alike."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

# Relative RMS against the float64 definition that an operator may have: (outputs, gradients). They
# belong to a dtype and never to a machine.
REL_RMS = {
  "float64": (1e-11, 1e-11),
  "float32": (2e-6, 2e-6),
  "bfloat16": (8e-3, 1.2e-2),
}
# The same for repeated keys and other inputs that amplify rounding.
UGLY_REL_RMS = {"float64": 1e-11, "float32": 1e-5}


def rel_rms(x, ref) -> float:
  """Relative root mean square error; 0 where both are zero."""
  x, ref = np.asarray(x, np.float64), np.asarray(ref, np.float64)
  if x.shape != ref.shape:
    raise ValueError(f"x has shape {x.shape}, expected that of ref, {ref.shape}.")
  error = np.sqrt(np.mean((x - ref) ** 2))
  return float(error and error / np.sqrt(np.mean(ref**2)))


def cast(inputs: dict, dtype: str) -> dict[str, jax.Array]:
  """Floating inputs in `dtype`; a state S0 stays float32 at least, integers what they are."""

  def one(name, x):
    if not jnp.issubdtype(np.asarray(x).dtype, jnp.floating):
      return jnp.asarray(x)
    wide = name == "S0" and jnp.finfo(dtype).bits < 32
    return jnp.asarray(x, "float32" if wide else dtype)

  return {name: one(name, x) for name, x in inputs.items()}


def with_gradients(f: Callable, names: tuple[str, ...] = ("o", "S")) -> Callable:
  """(inputs, cotangents) -> outputs of f(**inputs) by `names`, and d<name> of floating inputs.

  Compiled, once for all inputs of one shape. Outputs are returned too: a backward alone would let
  the compiler drop half of the forward.
  """

  @jax.jit
  def run(inputs, cotangents):
    floating = {n: x for n, x in inputs.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    rest = {n: x for n, x in inputs.items() if n not in floating}
    outputs, pull = jax.vjp(lambda x: f(**x, **rest), floating)
    (grads,) = pull(jax.tree.map(lambda d, y: d.astype(y.dtype), cotangents, outputs))
    return dict(zip(names, outputs)) | {f"d{name}": x for name, x in grads.items()}

  return run


def random_cotangents(f: Callable, inputs: dict, seed: int = 1) -> tuple[np.ndarray, ...]:
  """A normal number for each number that f(**inputs) returns."""
  rng = np.random.default_rng(seed)
  shapes = jax.eval_shape(lambda x: f(**x), inputs)
  return tuple(rng.standard_normal(shape.shape) for shape in shapes)
