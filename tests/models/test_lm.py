"""The language model: scan and remat, prefill and decoding, input checks, lowering."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
import pytest
from jax import lax

from deltanet_jax.mixers.block_deltanet import BlockDeltaNetConfig
from deltanet_jax.mixers.deltanet import DeltaNetConfig
from deltanet_jax.mixers.gated_deltanet import GatedDeltaNetConfig
from deltanet_jax.mixers.kda import KDAConfig
from deltanet_jax.models import LM, PRESETS, build, preset
from deltanet_jax.models.build import abstract
from deltanet_jax.models.lm import check_tokens
from deltanet_jax.ops import compiling_for
from deltanet_jax.ops.testing import rel_rms
from tests.support.models import random_model

B, L = 2, 19
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 256, (B, L)), jnp.int32)
IDS = np.repeat([1, 2, 1], [6, 1, 12])[None].repeat(B, axis=0).astype(np.int32)


def loss(model, tokens, segment_ids=None):
  logits = model(tokens, segment_ids)
  picked = jnp.take_along_axis(
    jax.nn.log_softmax(logits[:, :-1], axis=-1), tokens[:, 1:, None], axis=-1
  )
  return -picked.mean()


def with_config(model: LM, **changes) -> LM:
  """The same weights with another configuration."""
  other = abstract(dataclasses.replace(model.cfg, **changes))
  return jax.tree.unflatten(jax.tree.structure(other), jax.tree.leaves(model))


@pytest.mark.parametrize(
  "name",
  ["deltanet-sliding-tiny", pytest.param("deltanet-global-tiny", marks=pytest.mark.slow)],
)
def test_scan_and_remat_change_nothing(name):
  model = random_model(preset(name, dtype="float64"), "float64")
  run = lambda model: jax.jit(jax.value_and_grad(loss))(model, TOKENS)
  value, grads = run(model)
  variants = [dict(scan=False), dict(remat="full")]
  for changes in variants if name == "deltanet-sliding-tiny" else [dict(remat="dots")]:
    other, other_grads = run(with_config(model, **changes))
    assert abs(other - value) < 1e-12
    errors = jax.tree.map(rel_rms, jax.tree.leaves(other_grads), jax.tree.leaves(grads))
    assert max(errors) < 1e-10, changes


@pytest.mark.parametrize(
  "name", ["deltanet-sliding-tiny", "deltanet-global-tiny", "mamba-tiny", "hyena-tiny"]
)
def test_prefill_and_decoding_equal_the_forward_pass(name):
  model = random_model(preset(name, dtype="float64"), "float64")

  @jax.jit
  def run(model, tokens):
    first, state = model.prefill(tokens[:, :7], model.init_state(B, L))
    step = lambda state, t: model.step(t, state)[::-1]
    _, rest = lax.scan(step, state, tokens[:, 7:].T)
    return model(tokens), jnp.concatenate([first, jnp.moveaxis(rest, 0, 1)], axis=1)

  want, got = run(model, TOKENS)
  assert rel_rms(got, want) < 1e-10


def test_packed_segments_equal_separate_sequences():
  model = random_model(preset("deltanet-sliding-tiny", dtype="float64"), "float64")
  packed = jax.jit(lambda m: m(TOKENS, jnp.asarray(IDS)))(model)
  alone = jax.jit(lambda m: m(TOKENS[:, 7:]))(model)
  assert rel_rms(packed[:, 7:], alone) < 1e-10


def test_bfloat16_computation_has_float32_gradients_and_logits():
  model = random_model(preset("deltanet-sliding-tiny"))
  half = with_config(model, dtype="bfloat16")
  logits = jax.jit(lambda m: m(TOKENS))(half)
  value, grads = jax.jit(jax.value_and_grad(loss))(half, TOKENS)
  assert logits.dtype == jnp.float32
  assert {x.dtype for x in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))
  # Tolerance: rounding the weights alone has an error of 1.5e-2, and activations are rounded too,
  # a few times per layer.
  rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), model)
  full, from_rounded = (jax.jit(lambda m: m(TOKENS))(m) for m in (model, rounded))
  assert rel_rms(logits, full) < 4 * rel_rms(from_rounded, full)
  assert abs(float(value) - float(jax.jit(loss)(model, TOKENS))) < 0.05


def test_initialization():
  model = build(preset("gated-deltanet-tiny", depth=2))
  block = model.stacks[0].unit.blocks[0]
  kernel = np.asarray(block.mlp.gate.kernel[...])
  assert abs(kernel.std() - 0.02) < 0.001 and not np.array_equal(kernel[0], kernel[1])
  np.testing.assert_array_equal(model.norm.scale[...], 1)
  dt = jax.nn.softplus(block.mixer.dt_bias[...])
  assert (dt > 0.9e-3).all() and (dt < 0.11).all()


def lowered_step(cfg, length=64, platforms=None):
  """Lower forward, backward and AdamW update, from shapes alone."""
  optimizer = optax.adamw(1e-3)

  def step(model, moments, tokens):
    value, grads = jax.value_and_grad(loss)(model, tokens)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes inside
      updates, moments = optimizer.update(grads, moments, model)
    return value, optax.apply_updates(model, updates), moments

  model = abstract(cfg)
  tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
  traced = jax.jit(step).trace(model, jax.eval_shape(optimizer.init, model), tokens)
  return traced.lower(lowering_platforms=platforms) if platforms else traced.lower()


def test_program_size_is_independent_of_depth():
  short, long = (
    len(lowered_step(preset("deltanet-sliding-tiny", depth=depth)).as_text()) for depth in (4, 24)
  )
  assert long < 1.02 * short


@pytest.mark.slow
def test_compile_time_is_independent_of_depth():
  times = {4: [], 24: []}
  for i, depth in enumerate((4, 24) * 2):
    # A new vocabulary size, so that nothing comes from the compilation cache.
    lowered = lowered_step(preset("deltanet-tiny", depth=depth, vocab=250 + i))
    # CPU time of all threads: independent of other processes.
    start = time.process_time()
    lowered.compile()
    times[depth].append(time.process_time() - start)
  assert min(times[24]) < 1.5 * min(times[4]), times


def test_concrete_ids_outside_the_vocabulary_raise():
  """Unchecked, JAX clamps them, and logits are finite."""
  model = random_model(preset("deltanet-tiny", depth=1))
  state = model.init_state(1, 4)
  for id in (256, -1):
    tokens = jnp.asarray([[3, id]], jnp.int32)
    for call in (
      lambda: model(tokens),
      lambda: model.prefill(tokens, state),
      lambda: model.step(tokens[:, 1], state),
      lambda: jax.jit(lambda m: m(tokens))(model),  # a compile-time constant
    ):
      with pytest.raises(ValueError, match=f"token id {id} is outside the vocabulary of 256"):
        call()
  assert np.isfinite(model(jnp.asarray([[3, 255]], jnp.int32))).all()


def test_tokens_of_wrong_shape_or_dtype_raise():
  model = abstract(preset("deltanet-tiny", depth=1))
  with pytest.raises(ValueError, match=r"tokens has shape \[2, 0\], expected \[B L\], B and L of"):
    jax.eval_shape(lambda m, x: m(x), model, jax.ShapeDtypeStruct((2, 0), jnp.int32))
  # Called directly: under pytest, jaxtyping would raise before.
  for tokens, axes, words in (
    (np.zeros((0, 3), int), "BL", r"tokens has shape \[0, 3\], expected \[B L\]"),
    (np.zeros(3, int), "BL", r"tokens has shape \[3\], expected \[B L\]"),
    (np.zeros((2, 3), int), "B", r"tokens has shape \[2, 3\], expected \[B\],"),
    (np.zeros((2, 3)), "BL", "tokens has dtype float64, expected an array of integers"),
    ([[1, 2]], "BL", "list.*expected an array of integers"),
  ):
    with pytest.raises(ValueError, match=words):
      check_tokens(tokens, axes, 256)


def test_segment_ids_of_wrong_shape_raise():
  model = abstract(preset("deltanet-tiny", depth=1))
  ids = jax.ShapeDtypeStruct((2, 4), jnp.int32)
  tokens = jax.ShapeDtypeStruct((2, 3), jnp.int32)
  jaxtyping.config.update("jaxtyping_disable", True)  # it would raise before
  try:
    with pytest.raises(ValueError, match=r"segment_ids has shape \(2, 4\).* \[2, 3\]"):
      jax.eval_shape(lambda m, x, ids: m(x, ids), model, tokens, ids)
  finally:
    jaxtyping.config.update("jaxtyping_disable", False)


def test_token_check_adds_nothing_to_the_program(monkeypatch):
  model = abstract(preset("deltanet-tiny", depth=1))
  lower = lambda: jax.jit(lambda m, x: m(x)).lower(model, TOKENS).as_text()
  checked = lower()
  monkeypatch.setattr("deltanet_jax.models.lm.check_tokens", lambda *_: None)
  assert lower() == checked


# Kernel names of the delta rule on each platform, forward and backward; and of linear attention.
KERNELS = {
  "cuda": ("delta_rule_fwd", "delta_rule_grads"),
  "tpu": ("delta_rule_fwd", "delta_rule_bwd"),
}
LINEAR = {
  "cuda": ("linear_attention_fwd", "linear_attention_grads"),
  "tpu": ("linear_attention_fwd", "linear_attention_bwd"),
}
# One per operator, at full size (only shapes are needed); the others run in `make test-slow`.
FAST = {
  "deltanet-sliding-1.3b",
  "gated-deltanet-tiny",
  "gla-conv-340m",
  "kda-tiny",
  "mamba-340m",
  "retnet-340m",
  "s4d-340m",
}


@pytest.mark.parametrize("platform", KERNELS)
@pytest.mark.parametrize(
  "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in PRESETS]
)
def test_lowers_for_gpu_and_tpu(name, platform):
  cfg = preset(name, dtype="bfloat16")
  # Kernels support key sizes up to 256 and value sizes up to 512; larger ones run in XLA.
  expected = False
  for mixer in cfg.mixers.values():
    if isinstance(mixer, DeltaNetConfig | GatedDeltaNetConfig | KDAConfig):  # and DeltaProduct
      expected = mixer.key_size <= 256 and mixer.value_size <= 512
    elif isinstance(mixer, BlockDeltaNetConfig):
      expected = mixer.block_size <= 256 and mixer.value_size <= 512
  with compiling_for("gpu" if platform == "cuda" else platform):
    text = lowered_step(cfg, platforms=(platform,)).as_text()
  assert "stablehlo.dot_general" in text
  for kernel in KERNELS[platform]:
    assert (kernel in text) == expected, kernel
  if name.startswith(("gla", "hgrn2", "retnet", "rwkv6")):
    assert all(kernel in text for kernel in LINEAR[platform])
  if name.startswith("deltanet") and name.endswith("1.3b"):
    convolved = "noconv" not in name
    assert all((kernel in text) == convolved for kernel in ("short_conv_fwd", "short_conv_bwd"))
    assert ("head_norm_bwd" in text) == (platform == "cuda")
