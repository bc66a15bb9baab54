"""Attention kernels for TPU and GPU in interpret mode, against the reference implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanet_jax.ops import causal_attention
from deltanet_jax.ops.testing import REL_RMS, rel_rms
from pallas_kernels.attention import mask_ranges, reference
from pallas_kernels.attention.pallas_gpu import tiles
from pallas_kernels.attention.pallas_tpu import attention as tpu
from pallas_kernels.common.gpu import compiling_for_gpu

KERNELS = ("pallas_tpu", "pallas_gpu")


def inputs(L, H=2, Hk=1, d=16, B=2, dtype="bfloat16"):
  rng = np.random.default_rng(0)
  rounded = lambda heads: jnp.asarray(rng.standard_normal((B, L, heads, d)), dtype)
  ids = np.cumsum(rng.random((B, L)) < 4 / L, axis=1) % 3  # some ids occur again
  return (rounded(H), rounded(Hk), rounded(Hk)), jnp.asarray(ids, jnp.int32)


def value_and_gradients(args, **options):
  f = lambda args: causal_attention(*args, **options)

  @jax.jit
  def run(args):
    o, pull = jax.vjp(f, args)
    return o, *pull(jnp.cos(o))[0]

  return run(args)


# Lengths that are and are not multiples of the block, several blocks; with and without GQA.
CASES = [
  ("pallas_tpu", 200, None, True, 1),
  ("pallas_tpu", 256, 70, True, 2),
  ("pallas_tpu", 40, 7, False, 2),
  ("pallas_gpu", 200, None, True, 1),
  ("pallas_gpu", 384, 70, True, 2),
  ("pallas_gpu", 300, 130, False, 1),
  ("pallas_gpu", 40, 50, False, 2),
  ("pallas_gpu", 1, 3, True, 2),
]


@pytest.mark.parametrize("implementation,L,window,packed,Hk", CASES)
def test_kernel_equals_reference(implementation, L, window, packed, Hk):
  args, ids = inputs(L, Hk=Hk)
  options = dict(window=window, segment_ids=ids if packed else None)
  got = value_and_gradients(args, implementation=implementation, interpret=True, **options)
  exact = tuple(x.astype("float64") for x in args)
  want = value_and_gradients(exact, implementation="plain", **options)
  errors = [rel_rms(x, y) for x, y in zip(got, want, strict=True)]
  o, gradients = REL_RMS["bfloat16"]
  assert errors[0] <= o and max(errors[1:]) <= gradients, errors
  assert all(x.dtype == jnp.bfloat16 for x in got)


# Two heads per lane tile with an odd number of heads; a padded head size; heads of one and two lane
# tiles.
@pytest.mark.parametrize("H,d", [(3, 64), (2, 24), (1, 128), (1, 256)])
def test_heads_in_lanes(H, d):
  args, ids = inputs(150, H=H, Hk=H, d=d, B=1)
  options = dict(window=60, segment_ids=ids)
  got = value_and_gradients(args, implementation="pallas_tpu", interpret=True, **options)
  want = value_and_gradients([x.astype("float64") for x in args], implementation="plain", **options)
  assert max(map(rel_rms, got, want)) <= REL_RMS["bfloat16"][0]


# Four heads per key head (GQA); the largest head size, float16; a padded head size.
@pytest.mark.parametrize(
  "H,Hk,d,dtype", [(4, 1, 64, "bfloat16"), (1, 1, 128, "float16"), (2, 1, 80, "bfloat16")]
)
def test_heads_on_gpu(H, Hk, d, dtype):
  args, ids = inputs(150, H, Hk, d, B=1, dtype=dtype)
  options = dict(window=60, segment_ids=ids)
  got = value_and_gradients(args, implementation="pallas_gpu", interpret=True, **options)
  want = value_and_gradients([x.astype("float64") for x in args], implementation="plain", **options)
  assert max(map(rel_rms, got, want)) <= REL_RMS["bfloat16"][0]
  assert all(x.dtype == dtype for x in got)


@pytest.mark.parametrize("chip", ["A100", "H100", "B200"])
@pytest.mark.parametrize("d", [64, 128])
def test_tiles_of_gpus(chip, d):
  """Tile sizes of every chip, on sequences of more than one block."""
  args, ids = inputs(300, 1, 1, d, B=1)
  options = dict(window=200, segment_ids=ids)
  with compiling_for_gpu(chip):
    assert tiles.tile_for("fwd", 4096, d) == tiles.TILES[chip][d]["fwd"]
    assert tiles.tile_for("bwd", 20, d).own == 32
    got = value_and_gradients(args, implementation="pallas_gpu", interpret=True, **options)
  want = value_and_gradients([x.astype("float64") for x in args], implementation="plain", **options)
  assert max(map(rel_rms, got, want)) <= REL_RMS["bfloat16"][0]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 1, 5, 100])
def test_mask_ranges(window, packed):
  """first_keys and last_queries describe the mask and are non-decreasing."""
  L, padded = 37, 48
  _, ids = inputs(L)
  segments = jnp.cumsum(jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0))), axis=1)
  segments = segments.astype("int32") if packed else None
  first = mask_ranges.first_keys(segments, 2, padded, window)
  last = mask_ranges.last_queries(segments, 2, padded, window)
  index = jnp.arange(L, dtype="int32")
  mask = jnp.broadcast_to(reference.causal_mask(index[:, None], index[None, :], window), (2, L, L))
  if packed:
    mask &= segments[:, :, None] == segments[:, None, :]
  causal = (index[:, None] >= index[None, :])[None]
  np.testing.assert_array_equal(mask, causal & (index[None, None, :] >= first[:, :L, None]))
  np.testing.assert_array_equal(mask, causal & (index[None, :, None] <= last[:, None, :L]))
  assert (jnp.diff(first) >= 0).all() and (jnp.diff(last) >= 0).all()


def test_blocks_outside_the_window_are_not_read_on_gpu():
  """NaN at the start of a sequence does not spread: blocks outside the window are skipped."""
  (q, k, v), _ = inputs(512, B=1)
  args = tuple(x.at[:, :64].set(jnp.nan) for x in (q, k, v))
  got = value_and_gradients(args, window=20, implementation="pallas_gpu", interpret=True)
  assert all(jnp.isnan(x[:, :64]).any() and jnp.isfinite(x[:, 256:]).all() for x in got)


@pytest.mark.parametrize("window", [None, 200])
def test_sequences_longer_than_a_span(window, monkeypatch):
  """Sequences that exceed VMEM are split into pairs of query and key spans, some of them empty."""
  monkeypatch.setattr(tpu, "SPAN", 128)
  args, ids = inputs(500, Hk=1, B=1)
  options = dict(window=window, segment_ids=ids)
  got = value_and_gradients(args, implementation="pallas_tpu", interpret=True, **options)
  want = value_and_gradients([x.astype("float64") for x in args], implementation="plain", **options)
  assert max(map(rel_rms, got, want)) <= REL_RMS["bfloat16"][0]


@pytest.mark.parametrize("implementation", KERNELS)
def test_second_order_and_vmap(implementation):
  """The second derivative is that of the reference; `vmap` folds into the batch."""
  args, ids = inputs(24, Hk=1, B=1)

  def squares(args, ids, **options):
    f = lambda args: jnp.sin(causal_attention(*args, segment_ids=ids, **options).astype("float32"))
    return sum((x.astype("float32") ** 2).sum() for x in jax.grad(lambda a: f(a).sum())(args))

  kernel = dict(implementation=implementation, interpret=True)
  got = jax.jit(jax.grad(lambda x: squares(x, ids, **kernel)))(args)
  want = jax.jit(jax.grad(lambda x: squares(x, ids, implementation="plain")))(args)
  for x, y in zip(got, want):
    assert rel_rms(x, y) < 2 * REL_RMS["bfloat16"][1]
  stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), args)
  run = lambda x: causal_attention(*x, segment_ids=ids, **kernel)
  both = jax.jit(jax.vmap(run))(stacked)
  np.testing.assert_array_equal(both[1], jax.jit(run)(jax.tree.map(lambda x: 2 * x, args)))


def test_unsupported_inputs_raise():
  (q, k, v), _ = inputs(8)
  float32 = [x.astype("float32") for x in (q, k, v)]
  large_heads = [jnp.zeros((1, 8, 1, 257), "bfloat16")] * 3
  for implementation in KERNELS:
    with pytest.raises(ValueError, match=f"{implementation} takes q, k, v of one dtype, bfloat16"):
      causal_attention(*float32, implementation=implementation)
    with pytest.raises(ValueError, match="channels, got 257; use implementation="):
      causal_attention(*large_heads, implementation=implementation)
    with pytest.raises(ValueError, match="compiled for a CPU"):
      causal_attention(q, k, v, implementation=implementation)
  with pytest.raises(ValueError, match=r"is for Pallas kernels.*got 'plain'"):
    causal_attention(q, k, v, implementation="plain", interpret=True)


@pytest.mark.parametrize(
  "length,heads,block",
  [(1, 1, 128), (512, 2, 512), (513, 2, 128), (2048, 1, 512), (2049, 2, 256), (2048, 8, 128)],
)
def test_choose_block(length, heads, block):
  assert tpu.choose_block(length, heads) == block
