"""Compare mixers with the same layers of Hugging Face transformers, with the same weights.

transformers and torch are no dependencies: they run in an environment of their own.

  python -m venv OTHER && OTHER/bin/pip install torch transformers
  python -m experiments.bench.compare_transformers --reference_python=OTHER/bin/python

Errors are the largest absolute difference relative to the root mean square of the reference: of
the output, of the output when decoding token by token, of the gradient of the input, and of the
weight gradient with the largest error. Both compute in float32.
"""

from experiments.lib import early_signals  # noqa: F401, before imports that take seconds

# isort: split
import json
import pathlib
import subprocess
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx
from jax import lax
from tqdm import tqdm

from deltanet_jax.mixers import Mixer, build_mixer
from experiments.bench import compare_transformers_worker
from experiments.bench.compare_transformers_cases import CASES, B, D, L, LayerCase
from experiments.lib import app, records
from experiments.lib.tables import table

_PYTHON = flags.DEFINE_string(
  "reference_python", None, "Python of an environment that has torch and transformers."
)
_LAYERS = flags.DEFINE_multi_enum(
  "layer",
  [case.layer for case in CASES],
  [case.layer for case in CASES],
  "Layer of transformers to compare with; repeatable.",
)


def path_of(path: tuple) -> str:
  """The name of a weight, like `output.norm.scale`."""
  names = [str(getattr(part, "name", getattr(part, "key", part))) for part in path]
  return ".".join(name for name in names if name != "value")


def random_mixer(case: LayerCase, rng: np.random.Generator) -> Mixer:
  """Our mixer with perturbed initial weights, so that none is exactly zero or one."""
  mixer = build_mixer(case.config, D, eps=case.eps, rngs=nnx.Rngs(params=0))

  def weight(path, x):
    name = path_of(path)
    if name in case.missing:
      return jnp.zeros_like(x)
    std = x.shape[0] ** -0.5 if x.ndim == 2 else 0.2
    return x + case.add.get(name, 0.0) + jnp.asarray(std * rng.standard_normal(x.shape), x.dtype)

  return jax.tree_util.tree_map_with_path(weight, mixer)


def decode(mixer: Mixer, x):
  """The output of decoding token by token."""

  def step(state, x_t):
    y_t, state = mixer.step(x_t, state)
    return state, y_t

  _, y = lax.scan(step, mixer.init_state(B, L, x.dtype), x.swapaxes(0, 1))
  return y.swapaxes(0, 1)


def error(ours, theirs) -> float:
  """Largest absolute difference relative to the root mean square of the reference."""
  ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
  return float(np.abs(ours - theirs).max() / np.sqrt(np.mean(theirs**2)))


@jax.jit
def _ours(mixer, x, dy):
  y, vjp = jax.vjp(lambda mixer, x: mixer(x), mixer, x)
  return y, decode(mixer, x), *vjp(dy)


class Comparison:
  """One case: writes the request to the worker, and compares its answer with our mixer."""

  def __init__(self, case: LayerCase):
    rng = np.random.default_rng(0)
    self.case, self.mixer = case, random_mixer(case, rng)
    self.x, self.dy = rng.standard_normal((2, B, L, D)).astype(np.float32)

  def write_request(self, folder: pathlib.Path):
    weights = {f"weights/{name}": x for name, x in self.case.weights(self.mixer).items()}
    settings = json.dumps(dict(hidden_size=D, **self.case.settings))
    request = dict(layer=self.case.layer, settings=settings, x=self.x, dy=self.dy)
    np.savez(folder / f"request_{self.case.layer}.npz", **request, **weights)

  def metrics(self, folder: pathlib.Path) -> dict:
    theirs = np.load(folder / f"answer_{self.case.layer}.npz")
    with jax.default_matmul_precision("highest"):
      y, decoded, gradients, dx = _ours(self.mixer, self.x, self.dy)
      # Gradients of the reference, mapped to our weights.
      copied, back = jax.vjp(self.case.weights, self.mixer)
      (their_gradients,) = back({name: jnp.asarray(theirs[f"weights/{name}"]) for name in copied})
    named = jax.tree_util.tree_leaves_with_path(gradients)
    errors = {
      path_of(path): error(ours, of_theirs)
      for (path, ours), of_theirs in zip(named, jax.tree.leaves(their_gradients), strict=True)
      if path_of(path) not in self.case.missing
    }
    worst = max(errors, key=errors.get)
    return dict(
      output=error(y, theirs["y"]),
      decoding=error(decoded, theirs["y"]),
      input_gradient=error(dx, theirs["dx"]),
      weight_gradient=errors[worst],
      worst_weight=worst,
      missing=list(self.case.missing),
    )


def run_worker(python: str, folder: pathlib.Path) -> dict:
  """Run the reference on all requests in the folder; return its package versions."""
  # Isolated mode: our checkout is not on its path.
  command = [python, "-I", compare_transformers_worker.__file__, str(folder)]
  try:
    done = subprocess.run(command, capture_output=True, text=True)
  except OSError as wrong:
    raise ValueError(f"--reference_python={python} cannot be run: {wrong.strerror}.") from wrong
  if done.returncode:
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    raise ValueError(
      f"{python} could not run the reference: {last}; in its environment, pip install torch"
      " and a version of transformers that has all compared layers."
    )
  return json.loads((folder / "versions.json").read_text())


def show(results: list[tuple[dict, dict]]) -> str:
  columns = ("output", "decoding", "input_gradient", "weight_gradient")
  lines = [
    [key["mixer"], key["layer"], *(f"{x[column]:.1e}" for column in columns)] for key, x in results
  ]
  return table(["mixer", "layer", *(column.replace("_", " ") for column in columns)], lines)


def main():
  out = records.open("compare_transformers")
  if _PYTHON.value is None:
    raise ValueError("--reference_python is needed; see --help")
  cases = [case for case in CASES if case.layer in _LAYERS.value]
  key_of = lambda case: dict(mixer=case.config.kind, layer=case.layer, batch=B, length=L, width=D)
  if all(out.has(key_of(case)) for case in cases):
    print(f"{out.path} has all records of this commit; --again measures them again")
    return
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    comparisons = [Comparison(case) for case in tqdm(cases, desc="initializing weights")]
    for comparison in comparisons:
      comparison.write_request(folder)
    versions = run_worker(_PYTHON.value, folder)
    results = []
    for comparison in tqdm(comparisons, desc="comparing"):
      metrics = comparison.metrics(folder) | dict(versions=versions)
      results.append((key_of(comparison.case), metrics))
      out.write(*results[-1])
  print(show(results))
  print(f"all records: {out.path}; table: python -m experiments.plots")


if __name__ == "__main__":
  app.run(main)
