"""How exact the kernels are: interpreted, against the float64 definition.

python -m experiments.aot.kernel_errors      # some minutes

With float32 inputs, by the precision of their inverse; with bfloat16 ones as they are, by kinds of
keys and sizes of heads. What the definition gets are the inputs as rounded to their dtype.
"""

import functools
import time

import jax
import numpy as np
from tqdm import tqdm

from deltanet_jax.ops import delta_rule, testing
from deltanet_jax.ops.testing import Spec, random_inputs
from experiments.lib import app, records
from experiments.lib.tables import table
from pallas_kernels.common.bf16 import PARTS, inverse_precision

PRECISIONS = tuple(PARTS)
# Tokens per chunk, the kernels' own; substitution over 128 rows compiles for minutes.
CHUNKS = {
  "float32": {"pallas_tpu": 128, "pallas_gpu": 32},
  "bfloat16": {"pallas_tpu": 128, "pallas_gpu": 64},
}
SUBSTITUTION_CHUNK = 32
KEYS = ("random", "nearly identical")
LENGTHS = {"float32": 256, "bfloat16": 512}
SIZES = (64, 128)  # of heads, with bfloat16


def inputs(keys: str, dtype: str, size: int) -> dict[str, np.ndarray]:
  """Tokens with "random" keys, "nearly identical" ones and beta 1, or "beta up to 2"."""
  x = random_inputs(Spec(L=LENGTHS[dtype], H=1, dk=size))
  if keys == "nearly identical":
    rng = np.random.default_rng(2)
    k = x["k"][:, :1] + 1e-3 * rng.standard_normal(x["k"].shape)
    x["k"] = k / np.linalg.norm(k, axis=-1, keepdims=True)
    x["beta"] = np.ones_like(x["beta"])
  if keys == "beta up to 2":
    x["beta"] = 2 * x["beta"]
  x = testing.cast(x, dtype)
  return {name: np.asarray(y, np.float64) for name, y in x.items()}


def cases() -> list[dict]:
  """Every kernel with every kind of keys; in float32 with every precision, else with its own."""
  case = lambda kernel, keys, precision, dtype, size: dict(
    kernel=kernel, keys=keys, inverse_precision=precision, dtype=dtype, size=size
  )
  exact = [
    case(kernel, keys, precision, "float32", 64)
    for kernel in CHUNKS["float32"]
    for keys in KEYS
    for precision in PRECISIONS
  ]
  narrow = [
    case(kernel, keys, inverse_precision(None, "bfloat16"), "bfloat16", size)
    for kernel in CHUNKS["bfloat16"]
    for keys in (*KEYS, "beta up to 2")
    for size in SIZES
  ]
  return exact + narrow


def _outputs(x, dtype, **options):
  """o, S and every gradient for random cotangents."""
  rule = functools.partial(delta_rule, **options)
  x = testing.cast(x, dtype)
  return testing.with_gradients(rule)(x, testing.random_cotangents(rule, x))


@functools.cache
def _truth(keys, dtype, size):
  return _outputs(inputs(keys, dtype, size), "float64", implementation="recurrent")


def measure(kernel: str, keys: str, inverse_precision: str, dtype: str, size: int) -> dict:
  """Relative RMS errors: of o, of S, and the largest of a gradient and of all, and whose."""
  substitution = inverse_precision == "substitution"
  chunk = SUBSTITUTION_CHUNK if substitution else CHUNKS[dtype][kernel]
  how = dict(implementation=kernel, inverse_precision=inverse_precision, interpret=True)
  with jax.enable_x64(True):
    got = _outputs(inputs(keys, dtype, size), dtype, chunk=chunk, **how)
    want = _truth(keys, dtype, size)
  errors = {name: testing.rel_rms(got[name], want[name]) for name in want}
  worst = max(errors, key=errors.get)
  gradient = max((name for name in errors if name.startswith("d")), key=errors.get)
  return dict(
    chunk=chunk,
    error=errors[worst],
    of=worst,
    o=errors["o"],
    S=errors["S"],
    gradient=errors[gradient],
    of_gradient=gradient,
  )


def main():
  jax.config.update("jax_platforms", "cpu")
  out = records.open("kernel_errors")
  lines = []
  for case in tqdm([x for x in cases() if not out.has(x)], unit="case"):
    start = time.perf_counter()
    metrics = measure(**case)
    out.write(case, metrics, time.perf_counter() - start)
    cells = map(str, (*case.values(), metrics["chunk"]))
    lines.append([*cells, f"{metrics['error']:.1e}", metrics["of"]])
  if lines:
    header = ["kernel", "keys", "precision", "dtype", "size", "chunk", "largest error", "of"]
    print(table(header, lines))
  print(f"all rows: {out.path}")


if __name__ == "__main__":
  app.run(main)
