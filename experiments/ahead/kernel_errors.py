"""How exact a kernel is with every precision of its inverse: interpreted, against float64.

python -m experiments.ahead.kernel_errors      # two minutes
"""

import functools
import time

import jax
import numpy as np
from tqdm import tqdm

from deltanet_jax.ops import delta_rule, numerics
from deltanet_jax.ops.delta_rule.specs import Spec, random_inputs
from experiments.lib import app, records
from experiments.lib.tables import table
from pallas_kernels.bf16 import PARTS

PRECISIONS = tuple(PARTS)
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


def cases() -> list[dict]:
  """Every kernel with every precision and kind of keys."""
  return [
    dict(kernel=kernel, keys=keys, inverse_precision=precision)
    for kernel in CHUNKS
    for keys in KEYS
    for precision in PRECISIONS
  ]


def _outputs(x, dtype, **options):
  """o, S and every gradient for random cotangents."""
  rule = functools.partial(delta_rule, **options)
  x = numerics.cast(x, dtype)
  return numerics.with_gradients(rule)(x, numerics.random_cotangents(rule, x))


@functools.cache
def _truth(keys):
  return _outputs(inputs(keys), "float64", implementation="recurrent")


def measure(kernel: str, keys: str, inverse_precision: str) -> dict:
  """The largest relative RMS error of the case, and of what."""
  chunk = SUBSTITUTION_CHUNK if inverse_precision == "substitution" else CHUNKS[kernel]
  how = dict(implementation=kernel, inverse_precision=inverse_precision, interpret=True)
  with jax.enable_x64(True):
    got, want = _outputs(inputs(keys), "float32", chunk=chunk, **how), _truth(keys)
  errors = {name: numerics.rel_rms(got[name], want[name]) for name in want}
  worst = max(errors, key=errors.get)
  return dict(chunk=chunk, error=errors[worst], of=worst)


def main():
  jax.config.update("jax_platforms", "cpu")
  out = records.open("kernel_errors")
  lines = []
  for case in tqdm([x for x in cases() if not out.has(x)], unit="case"):
    start = time.perf_counter()
    figures = measure(**case)
    out.write(case, figures, time.perf_counter() - start)
    lines.append([*case.values(), str(figures["chunk"]), f"{figures['error']:.1e}", figures["of"]])
  if lines:
    print(table(["kernel", "keys", "precision", "chunk", "largest error", "of"], lines))
  print(f"all rows: {out.path}")


if __name__ == "__main__":
  app.run(main)
