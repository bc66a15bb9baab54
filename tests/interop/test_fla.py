"""FLA checkpoints: logits and gradients of a golden model, and unsupported options."""

import json
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from deltanet_jax.interop import fla_tensors, load_fla, save_fla
from deltanet_jax.interop.fla import from_fla
from deltanet_jax.ops.testing import rel_rms
from tests.support import plain_deltanet
from tests.support.models import random_model

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "model_f32_T40"
DEFAULTS = json.loads((GOLDEN / "config.json").read_text())


@pytest.fixture(scope="module")
def golden():
  return dict(np.load(GOLDEN.with_suffix(".npz")))


def relative(x, ref):
  """Return the maximum error relative to the maximum value."""
  return float(np.abs(np.asarray(x, np.float64) - ref).max() / np.abs(ref).max())


def test_logits_and_every_gradient(golden):
  model = load_fla(GOLDEN)
  tokens = jnp.asarray(golden["input_ids"], jnp.int32)

  @jax.jit
  def loss(model):
    logits = model(tokens)
    picked = jnp.take_along_axis(
      jax.nn.log_softmax(logits[:, :-1], axis=-1), tokens[:, 1:, None], axis=-1
    )
    return -picked.mean(), logits

  (value, logits), grads = jax.value_and_grad(loss, has_aux=True)(model)
  assert max(rel_rms(logits, golden["logits"]), relative(logits, golden["logits"])) < 2e-6
  assert abs(float(value) / golden["loss"] - 1) < 2e-6
  got = fla_tensors(grads)
  want = {name[2:]: x for name, x in golden.items() if name.startswith("g:")}
  assert got.keys() == want.keys()
  errors = {name: max(rel_rms(got[name], x), relative(got[name], x)) for name, x in want.items()}
  assert max(errors.values()) < 1e-5, errors


def weights(model):
  return jax.tree.leaves(model)


def assert_same_weights(a, b):
  for x, y in zip(weights(a), weights(b), strict=True):
    np.testing.assert_array_equal(x, y)


def test_save_then_load_is_bitwise(tmp_path):
  model = load_fla(GOLDEN)
  save_fla(model, tmp_path)
  assert_same_weights(model, load_fla(tmp_path))
  old, new = (safetensors.numpy.load_file(f / "model.safetensors") for f in (GOLDEN, tmp_path))
  assert old.keys() == new.keys()
  assert all(np.array_equal(old[name], new[name]) for name in old)


def test_the_plain_reference_is_the_golden_model(golden):
  tensors = safetensors.numpy.load_file(GOLDEN / "model.safetensors")
  got = plain_deltanet.logits(golden["input_ids"][0], tensors, DEFAULTS)
  assert relative(got, golden["logits"][0]) < 2e-6


OPTIONS = {
  "gate": dict(use_gate=True),
  "negative_eigenvalues": dict(allow_neg_eigval=True),
  "no_conv": dict(use_short_conv=False),
  "elu": dict(qk_activation="elu"),
  "elu_sum": dict(qk_activation="elu", qk_norm="sum"),
  "relu": dict(qk_activation="relu"),
  "identity": dict(qk_activation="identity"),
  "identity_no_conv": dict(qk_activation="identity", use_short_conv=False),
  "tied": dict(tie_word_embeddings=True),
  "expand": dict(expand_k=0.5, expand_v=2.0),
  "inner": dict(intermediate_size=96),
  "ratio": dict(hidden_ratio=2),
  "eps": dict(norm_eps=1e-2),
  "wide_conv": dict(conv_size=3),
  "bfloat16": dict(dtype="bfloat16"),
  "together": dict(
    use_gate=True,
    allow_neg_eigval=True,
    use_short_conv=False,
    qk_norm="sum",
    qk_activation="relu",
    tie_word_embeddings=True,
    expand_v=0.5,
    torch_dtype="bfloat16",
  ),
}


@pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS)
def test_options_are_applied_and_survive_saving(changes, tmp_path):
  options = DEFAULTS | dict(num_hidden_layers=1) | changes
  if "torch_dtype" in changes:  # the name of dtype in older files
    del options["dtype"]
  # Large parameters, so that every option changes the result.
  model = random_model(from_fla(options), std=0.3)
  dtype = model.cfg.dtype
  if dtype == "bfloat16":
    model = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), model)
  save_fla(model, tmp_path)
  tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
  assert {x.dtype for x in tensors.values()} == {np.dtype(getattr(ml_dtypes, dtype, dtype))}
  assert ("lm_head.weight" in tensors) != options["tie_word_embeddings"]
  again = load_fla(tmp_path)
  assert again.cfg.mixers == model.cfg.mixers and again.cfg.dtype == dtype
  assert_same_weights(model, again)

  tokens = np.random.default_rng(0).integers(0, 97, 9)
  # The written file and the original options give the same logits.
  written = json.loads((tmp_path / "config.json").read_text())
  want = plain_deltanet.logits(tokens, tensors, options)
  np.testing.assert_array_equal(plain_deltanet.logits(tokens, tensors, written), want)
  exact = load_fla(tmp_path, dtype="float64")
  got = jax.jit(lambda model, tokens: model(tokens))(exact, jnp.asarray(tokens[None], jnp.int32))
  assert relative(got[0], want) < 1e-12
  # Options that change no shape: without one, the same tensors give other logits.
  for name in changes.keys() & {"allow_neg_eigval", "qk_norm", "qk_activation", "norm_eps"}:
    other = plain_deltanet.logits(tokens, tensors, options | {name: DEFAULTS[name]})
    assert relative(other, want) > 1e-3, name


UNSUPPORTED = {
  "no beta": (dict(use_beta=False), "use_beta"),
  "norm first": (dict(norm_first=True), "norm_first = True"),
  "unknown": (dict(rotary=True), "rotary"),
  "other model": (dict(model_type="gla"), r"model_type = 'gla', expected one of"),
  "a run": (dict(model_type=None, config={}), "belongs to a run or an export .* --workdir"),
  "norm": (dict(qk_norm="l3"), "qk_norm"),
  "activation": (dict(qk_activation="gelu"), "qk_activation"),
  "dtype": (dict(dtype="float16"), "float16"),
  "heads": (dict(num_heads=3), "3 heads"),
  "no width": (dict(hidden_size=None), "hidden_size"),
}


@pytest.mark.parametrize("changes,message", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported_options_raise(changes, message, tmp_path):
  options = DEFAULTS | changes
  (tmp_path / "config.json").write_text(json.dumps(options))
  with pytest.raises(ValueError, match=message):
    load_fla(tmp_path)
