"""Numerical error of the delta-rule kernels, run in interpret mode, against a float64 reference.

python -m experiments.aot.kernel_errors      # a few minutes

float32 inputs: by the precision of the triangular inverse. bfloat16 inputs: by kind of keys and
head size, at the kernel's default precision. The reference gets the inputs rounded to their dtype.
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
# Default chunk sizes of the kernels; substitution over 128 rows of a chunk compiles for minutes.
CHUNKS = {
  "float32": {"pallas_tpu": 128, "pallas_gpu": 32},
  "bfloat16": {"pallas_tpu": 128, "pallas_gpu": 64},
}
SUBSTITUTION_CHUNK = 32
KEYS = ("random", "nearly identical")
LENGTHS = {"float32": 256, "bfloat16": 512}
HEAD_SIZES = (64, 128)  # with bfloat16


def inputs(keys: str, dtype: str, head_size: int) -> dict[str, np.ndarray]:
  """Inputs with "random" keys, "nearly identical" keys and beta = 1, or "beta up to 2"."""
  x = random_inputs(Spec(L=LENGTHS[dtype], H=1, dk=head_size))
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
  """Every kernel and kind of keys; float32 with every precision, bfloat16 with the default."""
  case = lambda kernel, keys, precision, dtype, head_size: dict(
    kernel=kernel, keys=keys, inverse_precision=precision, dtype=dtype, head_size=head_size
  )
  float32 = [
    case(kernel, keys, precision, "float32", 64)
    for kernel in CHUNKS["float32"]
    for keys in KEYS
    for precision in PRECISIONS
  ]
  bfloat16 = [
    case(kernel, keys, inverse_precision(None, "bfloat16"), "bfloat16", head_size)
    for kernel in CHUNKS["bfloat16"]
    for keys in (*KEYS, "beta up to 2")
    for head_size in HEAD_SIZES
  ]
  return float32 + bfloat16


def _outputs(x, dtype, **options):
  """o, S and all gradients for random cotangents."""
  rule = functools.partial(delta_rule, **options)
  x = testing.cast(x, dtype)
  return testing.with_gradients(rule)(x, testing.random_cotangents(rule, x))


@functools.cache
def _reference(keys, dtype, head_size):
  return _outputs(inputs(keys, dtype, head_size), "float64", implementation="recurrent")


def measure(kernel: str, keys: str, inverse_precision: str, dtype: str, head_size: int) -> dict:
  """Relative RMS errors of o and S, the largest over gradients, and the largest over all."""
  substitution = inverse_precision == "substitution"
  chunk = SUBSTITUTION_CHUNK if substitution else CHUNKS[dtype][kernel]
  options = dict(implementation=kernel, inverse_precision=inverse_precision, interpret=True)
  with jax.enable_x64(True):
    got = _outputs(inputs(keys, dtype, head_size), dtype, chunk=chunk, **options)
    want = _reference(keys, dtype, head_size)
  errors = {name: testing.rel_rms(got[name], want[name]) for name in want}
  worst = max(errors, key=errors.get)
  gradient = max((name for name in errors if name.startswith("d")), key=errors.get)
  return dict(
    chunk=chunk,
    max_error=errors[worst],
    worst_output=worst,
    o=errors["o"],
    S=errors["S"],
    gradient=errors[gradient],
    worst_gradient=gradient,
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
    lines.append([*cells, f"{metrics['max_error']:.1e}", metrics["worst_output"]])
  if lines:
    header = ["kernel", "keys", "inverse precision", "dtype", "head size", "chunk", "max rel. RMS"]
    print(table([*header, "output"], lines))
  print(f"all records: {out.path}")


if __name__ == "__main__":
  app.run(main)
