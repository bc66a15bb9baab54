"""Tiny test cases of every mixer; a new mixer adds an entry to CASES."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from deltanet_jax.mixers import build_mixer, mixer_config

# Two full chunks and one token.
B, L, D, CHUNK = 2, 9, 16, 4

_SMALL = dict(heads=2, key_size=8, value_size=12, chunk=CHUNK)
CASES = {
  "deltanet": mixer_config("deltanet")(**_SMALL),
  "deltanet_original": mixer_config("deltanet")(
    activation="elu", norm="l1", conv=0, output_gate=True, **_SMALL
  ),
  "deltanet_negative": mixer_config("deltanet")(
    activation="relu", negative_eigenvalues=True, **_SMALL
  ),
  "gated_deltanet": mixer_config("gated_deltanet")(**_SMALL),
  "kda": mixer_config("kda")(gate_rank=3, negative_eigenvalues=True, **_SMALL),
  "deltaproduct": mixer_config("deltaproduct")(steps=3, **_SMALL),
  "block_deltanet": mixer_config("block_deltanet")(block_size=4, **_SMALL),
  "attention": mixer_config("attention")(head_size=8),
  "window": mixer_config("attention")(head_size=4, window=3),
  "attention_without_positions": mixer_config("attention")(head_size=8, rope_base=None),
  # With RoPE: without it the bias of keys has no effect.
  "attention_bias": mixer_config("attention")(head_size=8, bias=True),
  "window_grouped": mixer_config("attention")(head_size=4, kv_heads=2, window=2 * L),
  "retnet": mixer_config("retnet")(heads=2, chunk=CHUNK),
  "retnet_conv": mixer_config("retnet")(heads=2, chunk=CHUNK, conv=4),
  "gla": mixer_config("gla")(heads=2, chunk=CHUNK),
  "gla_conv": mixer_config("gla")(heads=2, chunk=CHUNK, conv=4),
  "mamba": mixer_config("mamba")(state_size=4, chunk=CHUNK),
  "mamba_noconv": mixer_config("mamba")(state_size=4, chunk=CHUNK, conv=0),
  "mamba2": mixer_config("mamba2")(head_size=8, state_size=4, groups=2, chunk=CHUNK),
  "mlstm": mixer_config("mlstm")(heads=2, chunk=CHUNK),
  "hgrn2": mixer_config("hgrn2")(key_size=8, chunk=CHUNK, conv=4),
  "rwkv4": mixer_config("rwkv4")(chunk=CHUNK),
  "rwkv6": mixer_config("rwkv6")(head_size=8, shift_rank=4, decay_rank=4, chunk=CHUNK),
  "rwkv7": mixer_config("rwkv7")(head_size=8, decay_rank=4, rate_rank=4, gate_rank=4, chunk=CHUNK),
  "linear_attention": mixer_config("linear_attention")(heads=2, chunk=CHUNK),
  "linear_attention_normalized": mixer_config("linear_attention")(
    heads=2, feature_map="hedgehog", normalize=True, chunk=CHUNK, conv=4
  ),
  "gated_rfa": mixer_config("gated_rfa")(heads=2, head_size=6, features=5, chunk=CHUNK),
  "dfw": mixer_config("dfw")(heads=2, head_size=6, chunk=CHUNK),
  "abc": mixer_config("abc")(heads=2, slots=3, chunk=CHUNK),
  "gsa": mixer_config("gsa")(heads=2, slots=3, chunk=CHUNK),
}

_FILTER = dict(features=5, filter_width=4)
CASES |= {
  "s4d": mixer_config("s4d")(state_size=6),
  # A filter shorter than the sequence, and a longer one.
  "hyena": mixer_config("hyena")(length=6, **_FILTER),
  "multihead_hyena": mixer_config("multihead_hyena")(length=32, head_size=4, **_FILTER),
}


@functools.cache
def make(name: str, dtype: str = "float64"):
  """Return the mixer of a case and an input."""
  return draw_mixer(CASES[name], dtype)


def draw_mixer(cfg, dtype: str = "float64"):
  """Return a mixer with random weights, large enough to have an effect, and an input."""
  rng = np.random.default_rng(0)
  mixer = jax.eval_shape(lambda: build_mixer(cfg, D, rngs=nnx.Rngs(params=0)))
  # Weights from NumPy: initializers take seconds to compile.
  draw = lambda x: jnp.asarray((x.ndim == 1) + 0.3 * rng.standard_normal(x.shape), dtype)
  return jax.tree.map(draw, mixer), jnp.asarray(rng.standard_normal((B, L, D)), dtype)
