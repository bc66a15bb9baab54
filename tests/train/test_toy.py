"""A task without text and a user-defined mixer work with the same training loop."""

import itertools
import pathlib
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deltanet_jax.mixers
from deltanet_jax.config import ModelConfig
from deltanet_jax.data import Task
from deltanet_jax.eval import Validation
from deltanet_jax.mixers import MIXERS, mixer_config
from deltanet_jax.train import PreemptionError, load_trained, loop
from deltanet_jax.train.checkpoint import Checkpoints
from deltanet_jax.train.step import make_trainer
from tests.support.training import numbers, silent, tiny

HOW_TO = pathlib.Path(deltanet_jax.mixers.__file__).parent / "README.md"


class Copying(Task):
  """Copying: a sequence repeats a random half; only the second half is scored."""

  vocab = 16

  def __init__(self, batch, length, seed=0):
    self.shape, self.seed = (batch, length), seed

  def identity(self):
    return dict(task=f"copying of seed {self.seed}")

  def batch(self, step, host, hosts):
    (batch, length), share = self.shape, self.shape[0] // hosts
    half = np.random.default_rng((self.seed, step)).integers(0, 16, (batch, (length + 1) // 2 + 1))
    tokens = np.concatenate([half, half], axis=1)[:, : length + 1].astype(np.int32)
    tokens = tokens[host * share : (host + 1) * share]
    mask = np.broadcast_to(np.arange(length) >= length // 2, (share, length))
    ids = np.ones((share, length), np.int32)
    return dict(tokens=tokens[:, :-1], targets=tokens[:, 1:], segment_ids=ids, mask=mask)

  def validation(self, host, hosts):
    return (self.batch(10**6 + i, host, hosts) for i in range(2))


def norm_of_weights(context):
  """A custom evaluator that uses weights, model and step."""
  yield "weight_norm", float(sum(jnp.sum(w * w) for w in context.weights.values()))
  yield "vocabulary", context.model(jnp.zeros((1, 3), jnp.int32)).shape[-1] + context.step


def run(cfg, workdir):
  task = Copying(cfg.data.batch, cfg.data.length, cfg.seed)
  return silent(cfg, workdir, task, evaluators=[Validation(task), norm_of_weights])


@pytest.fixture
def stopped(monkeypatch):
  """Stop the run after update 7, once."""
  asked, signals = loop.Stop.asked, iter([True])
  monkeypatch.setattr(
    loop.Stop, "asked", lambda self, step: (step == 7 and next(signals, False)) or asked(self, step)
  )


def final_state(cfg, workdir):
  return Checkpoints(workdir, cfg.checkpoint).restore(make_trainer(cfg).state_shapes())


def test_a_task_without_text_resumes_bitwise_identically(tmp_path, stopped):
  cfg = tiny()
  with pytest.raises(PreemptionError, match="after step 7"):
    run(cfg, tmp_path / "stopped")
  results = run(cfg, tmp_path / "stopped")
  assert results == run(cfg, tmp_path / "uninterrupted")
  assert results["vocabulary"] == 260 + 12 and 0 <= results["validation_accuracy"] <= 1
  assert "validation_bits_per_byte" not in results
  assert numbers(tmp_path / "stopped") == numbers(tmp_path / "uninterrupted")
  states = (final_state(cfg, tmp_path / name) for name in ("stopped", "uninterrupted"))
  (state, meta), (expected, expected_meta) = states
  assert meta == expected_meta
  jax.tree.map(np.testing.assert_array_equal, state, expected)
  # The model loads without a tokenizer.
  assert load_trained(tmp_path / "uninterrupted").tokenizer is None


def test_another_task_raises(tmp_path):
  run(tiny(tokens=256), tmp_path / "run")
  other = Copying(8, 32, seed=1)
  with pytest.raises(ValueError, match="started with another task"):
    silent(tiny(tokens=256), tmp_path / "run", other)
  with pytest.raises(ValueError, match=r"batches are \(4, 32\), expected .* \(8, 32\)"):
    silent(tiny(), tmp_path / "new", Copying(4, 32))
  assert not (tmp_path / "new").exists()


@pytest.fixture
def average(monkeypatch):
  """The example mixer of mixers/README.md, with its file and its registry line."""
  file, line = re.findall(r"```python\n(.*?)```", HOW_TO.read_text(), re.DOTALL)
  module = types.ModuleType("average")
  monkeypatch.setitem(sys.modules, module.__name__, module)
  exec(compile(file, str(HOW_TO), "exec"), module.__dict__)
  monkeypatch.setitem(MIXERS, "average", None)  # removed again after the test
  exec(line, module.__dict__)
  return mixer_config("average")


def test_a_mixer_is_one_file_and_one_registry_line(tmp_path, average):
  cfg = tiny(tokens=40 * 256, eval_every=40)
  cfg.model = ModelConfig(
    vocab=16,
    width=32,
    depth=2,
    mlp_multiple=32,
    mixers={"slow": average(memory=0.99), "fast": average(memory=0.1)},
    pattern=("slow", "fast"),
  )
  run(cfg, tmp_path / "run")
  losses = [row["loss"] for row in numbers(tmp_path / "run") if "loss" in row]
  assert np.mean(losses[-5:]) < np.mean(losses[:5])
  # Settings and weights are restored by name.
  trained = load_trained(tmp_path / "run")
  assert trained.config == cfg
  tokens = jnp.asarray([[3, 1, 2]], jnp.int32)
  state = trained.model.init_state(1, 3)
  for t, want in itertools.islice(enumerate(trained.model(tokens)[0]), 3):
    logits, state = trained.model.step(tokens[:, t], state)
    np.testing.assert_allclose(logits[0], want, atol=1e-5)
  # Packed segments are independent.
  ids = jnp.asarray([[7, 7, 2]], jnp.int32)
  packed = trained.model(tokens, ids)[0]
  np.testing.assert_allclose(packed[:2], trained.model(tokens)[0, :2], atol=1e-5)
  np.testing.assert_allclose(packed[2:], trained.model(tokens[:, 2:])[0], atol=1e-5)
