"""How exact a kernel is with every precision of its inverse: interpreted, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from deltanet_jax.ops import delta_rule
from deltanet_jax.ops.delta_rule.specs import Spec, random_inputs

PRECISIONS = ("bf16", "bf16x3", "bf16x6", "substitution")
# Tokens per chunk, the kernels' own for float32; substitution over 128 rows compiles for minutes.
CHUNKS = {"pallas_tpu": 128, "pallas_gpu": 32}
SUBSTITUTION_CHUNK = 32
KEYS = ("random", "nearly identical")


def inputs(keys: str) -> dict[str, np.ndarray]:
  """256 tokens with "random" keys, or "nearly identical" ones and beta 1."""
  x = random_inputs(Spec(L=256, H=1, dk=64))
  if keys == "nearly identical":
    rng = np.random.default_rng(2)
    k = x["k"][:, :1] + 1e-3 * rng.standard_normal(x["k"].shape)
    x["k"] = k / np.linalg.norm(k, axis=-1, keepdims=True)
    x["beta"] = np.ones_like(x["beta"])
  return {name: np.asarray(y, np.float32) for name, y in x.items()}


def outputs(x: dict[str, np.ndarray], dtype: str, **options) -> dict[str, np.ndarray]:
  """o, S and every gradient for random cotangents."""
  rng = np.random.default_rng(1)
  cotangents = tuple(jnp.asarray(rng.standard_normal(x[n].shape), dtype) for n in ("v", "S0"))

  @jax.jit
  def run(x):
    (o, S), pull = jax.vjp(lambda x: delta_rule(**x, **options), x)
    (grads,) = pull(cotangents)
    return dict(o=o, S=S, **{f"d{name}": y for name, y in grads.items()})

  return jax.tree.map(np.asarray, run({name: jnp.asarray(y, dtype) for name, y in x.items()}))


def cases() -> list[dict]:
  """Every kernel with every precision and kind of keys."""
  return [
    dict(kernel=kernel, inverse_precision=precision, keys=keys)
    for kernel in CHUNKS
    for precision in PRECISIONS
    for keys in KEYS
  ]


def measure(case: dict) -> dict:
  """The case with its largest relative RMS error, and of what."""
  with jax.enable_x64(True):
    return case | _worst(**case)


@functools.cache
def _truth(keys):
  return outputs(inputs(keys), "float64", implementation="recurrent")


def _worst(kernel, inverse_precision, keys):
  chunk = SUBSTITUTION_CHUNK if inverse_precision == "substitution" else CHUNKS[kernel]
  how = dict(implementation=kernel, inverse_precision=inverse_precision, interpret=True)
  got, want = outputs(inputs(keys), "float32", chunk=chunk, **how), _truth(keys)
  size = lambda y: np.sqrt(np.mean(np.square(y)))
  errors = {name: float(size(got[name] - want[name]) / size(want[name])) for name in want}
  worst = max(errors, key=errors.get)
  return dict(chunk=chunk, error=errors[worst], of=worst)
