"""Programs around the kernels, AOT-compiled for TPU and GPU: bounds on their HBM traffic."""

import re

import jax
import jax.numpy as jnp
import pytest

from deltanet_jax.generate.loop import Decoding, decode
from deltanet_jax.generate.sample import Sampling
from deltanet_jax.models import preset
from deltanet_jax.models.build import abstract
from deltanet_jax.ops import cached_attention, causal_attention, init_cache, l2_norm
from experiments.aot import targets
from experiments.aot.hlo import HloModule
from experiments.aot.worker import Worker, compile_function


def decoding_loop(target):
  """HLO of decoding eight tokens with a small model, and the shape of its stacked states."""
  cfg = preset("deltanet-tiny", dtype="bfloat16", depth=3)
  model = abstract(cfg)
  now = jax.eval_shape(
    lambda model: Decoding(
      model.init_state(8, 16), jnp.zeros(8, jnp.int32), jnp.zeros(8, bool), jax.random.key(0)
    ),
    model,
  )
  stops = jax.ShapeDtypeStruct((0,), jnp.int32)
  run = lambda model, now, stops: decode(model, now, stops, 8, Sampling())
  compiled = compile_function(targets.one(target), run, (model, now, stops), donate=(1,))
  return compiled.hlo, now.state[0][0]["mixer"]["S"].shape


@pytest.mark.aot
@pytest.mark.parametrize("target", ["v5e", "h100"])
def test_decoding_moves_the_states_once(target):
  """Only the kernel touches the stacked states: no copy, slice or concatenation."""
  with Worker(targets.one(target)) as worker:
    hlo, shape = worker.call(decoding_loop, target)
  states = f"f32[{','.join(map(str, shape))}]"
  makers = re.findall(r"= (\(.*?\)|\S+) ([\w-]+)\(", hlo)
  makers = {op for result, op in makers if states in result}
  assert makers - {"parameter", "get-tuple-element", "tuple", "while"} == {"custom-call"}, makers


def head_norm_bytes(target):
  x = jax.ShapeDtypeStruct((16, 2048, 2048), jnp.bfloat16)
  compiled = compile_function(targets.one(target), lambda x: l2_norm(x, 128), (x,))
  moved = sum(move.bytes for move in HloModule(compiled.hlo).moves())
  return moved / (x.size * x.dtype.itemsize)


@pytest.mark.aot
def test_per_head_norms_keep_their_layout_on_tpu():
  """Two reads and one write; a reduction over [B L H d] would move 19 times the array."""
  with Worker(targets.one("v5e")) as worker:
    assert worker.call(head_norm_bytes, "v5e") <= 4.1


def cache_moves(target):
  """HBM traffic of one token against a cache of 4096, relative to the cache, without its update."""
  B, M, H, d = 32, 4096, 16, 64
  cache = jax.eval_shape(lambda: init_cache(B, M, H, d, jnp.bfloat16))
  x = jax.ShapeDtypeStruct((B, 1, H, d), jnp.bfloat16)
  run = lambda q, k, v, cache: cached_attention(q, k, v, cache)
  compiled = compile_function(targets.one(target), run, (x, x, x, cache), donate=(3,))
  moves = HloModule(compiled.hlo).moves()
  return sum(m.bytes for m in moves if "update" not in m.name) / (2 * B * M * H * d * 2)


@pytest.mark.aot
@pytest.mark.parametrize("target", ["v5e", "h100"])
def test_decoding_reads_a_cache_once(target):
  """No kernel could move less."""
  with Worker(targets.one(target)) as worker:
    assert worker.call(cache_moves, target) <= 1.1


def attention_kernels(target, window):
  """Kernel names of the attention gradient, and arrays as large as a mask."""
  B, L, H, d = 4, 2048, 4, 64
  x = jax.ShapeDtypeStruct((B, L, H, d), jnp.bfloat16)
  ids = jax.ShapeDtypeStruct((B, L), jnp.int32)

  def gradient(q, k, v, ids, do):
    f = lambda *x: causal_attention(*x, segment_ids=ids, window=window)
    return jax.vjp(f, q, k, v)[1](do)

  compiled = compile_function(targets.one(target), gradient, (x, x, x, ids, x))
  return set(compiled.grids), re.findall(rf"\[[\d,]*{L},{L}\]", compiled.hlo)


@pytest.mark.aot
@pytest.mark.parametrize("window", [None, 512])
@pytest.mark.parametrize("target", ["v5e", "h100"])
def test_attention_with_segments_uses_kernels_and_no_mask(target, window):
  with Worker(targets.one(target)) as worker:
    kernels, squares = worker.call(attention_kernels, target, window)
  assert kernels == {"attention_fwd", "attention_bwd"}
  assert not squares
