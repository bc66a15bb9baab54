"""Special cases in which delta-rule mixers are equal: equal channels, one step, one block."""

import jax
import jax.numpy as jnp
from flax import nnx

from deltanet_jax.mixers import build_mixer, mixer_config
from deltanet_jax.ops.testing import rel_rms
from tests.support.mixers import D, make

SIZES = dict(heads=2, key_size=8, value_size=12, chunk=4)


def with_weights(kind, weights, **changes):
  """A mixer of this kind with the weights of another one, in the same order."""
  cfg = mixer_config(kind)(**SIZES, **changes)
  mixer = jax.eval_shape(lambda: build_mixer(cfg, D, rngs=nnx.Rngs(params=0)))
  assert [x.shape for x in jax.tree.leaves(mixer)] == [x.shape for x in weights]
  return jax.tree.unflatten(jax.tree.structure(mixer), weights)


def same(a, b, x):
  run = jax.jit(lambda mixer: mixer(x))
  return rel_rms(run(a), run(b)) < 1e-12


def test_deltaproduct_with_one_step_is_gated_deltanet():
  gated, x = make("gated_deltanet")
  one = with_weights("deltaproduct", jax.tree.leaves(gated), steps=1, negative_eigenvalues=False)
  assert same(one, gated, x)


def test_deltaproduct_without_gates_and_with_one_step_is_deltanet():
  plain, x = make("deltanet")
  options = dict(steps=1, negative_eigenvalues=plain.cfg.negative_eigenvalues)
  options |= dict(conv=plain.cfg.conv, output_gate=plain.cfg.output_gate, forget_gate=False)
  one = with_weights("deltaproduct", jax.tree.leaves(plain), **options)
  assert same(one, plain, x)


def test_one_block_is_deltanet():
  whole, x = make("deltanet")
  one = with_weights("block_deltanet", jax.tree.leaves(whole), block_size=8)
  assert same(one, whole, x)


def test_kda_with_equal_channels_is_gated_deltanet():
  kda, x = make("kda")
  H, dk = kda.heads, kda.key_size
  kda = nnx.clone(kda)
  spread = lambda y: jnp.repeat(y[..., :H], dk, axis=-1)
  up, bias = kda.decay.up.kernel[...][:, :H], kda.dt_bias[...][:H]
  kda.decay.up.kernel[...], kda.dt_bias[...] = spread(up), spread(bias)
  # Output gate 1: sigmoid(50).
  gate = kda.output.gate.up
  gate.kernel[...], gate.bias[...] = 0 * gate.kernel[...], 0 * gate.bias[...] + 50
  cfg = mixer_config("gated_deltanet")(output_gate=False, negative_eigenvalues=True, **SIZES)
  gated = nnx.clone(make("gated_deltanet")[0])
  gated.cfg, gated.output.gate = cfg, None
  gated.qkv, gated.beta, gated.A_log = kda.qkv, kda.beta, kda.A_log
  gated.decay.kernel[...], gated.dt_bias[...] = kda.decay.down.kernel[...] @ up, bias
  gated.output.norm, gated.output.out = kda.output.norm, kda.output.out
  assert same(kda, gated, x)
