"""Programs of the gradient kernels on NVIDIA GPUs: one per (chunk, head), all in parallel."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common.bf16 import parts_for
from pallas_kernels.delta_rule.pallas_gpu.decay import Decay, load_chunk, program_ids
from pallas_kernels.delta_rule.pallas_gpu.launch import launch_kernel
from pallas_kernels.delta_rule.pallas_gpu.matmul import F32, NT, dot

Ref = Any


@dataclasses.dataclass(kw_only=True)
class ChunkProgram:
  """Refs of one program (None if its kernel has none), its indices, beta and decays."""

  v_ref: Ref  # [B L Hv dv]
  do_ref: Ref  # [B L Hv dv]
  q_ref: Ref = None  # [B L H dk]
  k_ref: Ref = None  # [B L H dk]
  states_ref: Ref = None  # [N B Hv dk dv], before each chunk
  dstates_ref: Ref = None  # [N B Hv dk dv], of the state after each chunk
  g_ref: Ref = None  # [B L Hv] or [B L Hv dk]
  segments_ref: Ref = None  # [B L]
  beta_ref: Ref = None  # [B L Hv], delta rule only
  R_ref: Ref = None  # [B L Hv dv], the written values; v for linear attention
  dY_ref: Ref = None  # [B L Hv dv], delta rule only
  dP_ref: Ref = None  # [N B Hv C C], gradients of Q K^T
  dA_ref: Ref = None  # [N B Hv C C], gradients of A, delta rule only
  # Outputs.
  dq_ref: Ref = None  # [B L Hv dk]
  dk_ref: Ref = None  # [B L Hv dk]
  dv_ref: Ref = None  # [B L Hv dv]
  dbeta_ref: Ref = None  # [B L Hv]
  dg_ref: Ref = None  # like g
  # Static sizes.
  per_channel: bool
  group: int  # value heads per key head
  chunk: int
  block_k: int
  block_v: int
  # Set from the above: indices, number of blocks and the contents of `Chunk`.
  n: jax.Array = dataclasses.field(init=False)  # chunk
  b: jax.Array = dataclasses.field(init=False)  # sequence
  h: jax.Array = dataclasses.field(init=False)  # value head
  hk: jax.Array = dataclasses.field(init=False)  # key head
  key_blocks: int = dataclasses.field(init=False)
  value_blocks: int = dataclasses.field(init=False)
  parts: int = dataclasses.field(init=False)
  rows: pl.Slice = dataclasses.field(init=False)
  beta: jax.Array | None = dataclasses.field(init=False)
  zero: jax.Array = dataclasses.field(init=False)
  iotas: tuple[jax.Array, jax.Array] = dataclasses.field(init=False)
  decay: Decay = dataclasses.field(init=False)

  def __post_init__(self):
    if self.R_ref is None:
      self.R_ref = self.v_ref
    self.n, self.h, self.b, self.hk = program_ids(self.group)
    self.key_blocks = 0 if self.k_ref is None else self.k_ref.shape[-1] // self.block_k
    self.value_blocks = self.v_ref.shape[-1] // self.block_v
    self.parts = parts_for(self.v_ref.dtype)
    some_ref, head = (self.v_ref, self.h) if self.k_ref is None else (self.k_ref, self.hk)
    g_ref = None if self.per_channel else self.g_ref
    self.rows, self.beta, self.zero, self.iotas, self.decay = load_chunk(
      some_ref, self.beta_ref, g_ref, self.segments_ref, self.n, self.b, self.h, head, self.chunk
    )

  @property
  def delta_rule(self) -> bool:
    return self.beta_ref is not None

  def keys(self, i):
    """Return the index of key block i in q and k."""
    return self.b, self.rows, self.hk, pl.ds(i * self.block_k, self.block_k)

  def head_keys(self, i):
    """Return the index of key block i in arrays [B L Hv dk]."""
    return self.b, self.rows, self.h, pl.ds(i * self.block_k, self.block_k)

  def values(self, j):
    """Return the index of value block j in arrays [B L Hv dv]."""
    return self.b, self.rows, self.h, pl.ds(j * self.block_v, self.block_v)

  def state(self, i, j):
    """Return the index of key block i and value block j in arrays [N B Hv dk dv]."""
    return self.n, self.b, self.h, self.keys(i)[3], self.values(j)[3]

  def opaque_b(self, load_id):
    """Return the index of the sequence as a value that depends on `load_id` for the compiler.

    Loads that use it are not shared between loop iterations. `zero` is 1 for a NaN; the index must
    still be in range.
    """
    return jnp.minimum(self.b + self.zero * load_id, self.v_ref.shape[0] - 1)

  def zeros(self, *shape):
    return jnp.zeros((self.chunk, *shape), F32)

  def times_states(self, rows_ref, states_ref, i):
    """Return rows states^T, summed over all values, for key block i: [C block_k]."""

    # One accumulator per loop: three together spill.
    def add(j, x):
      return x + dot(rows_ref[*self.values(j)], states_ref[*self.state(i, j)], self.parts, NT)

    return lax.fori_loop(0, self.value_blocks, add, self.zeros(self.block_k))


def score_gradients(p: ChunkProgram):
  """Return the gradients of Q K^T and A [C C] before masks, and the part of dbeta from values.

  The last two are None for linear attention. For the delta rule it also stores dv.
  """

  def over_values(j, carry):
    dP, dA, dbeta = carry
    cols = p.values(j)
    R = p.R_ref[*cols]
    dP += dot(p.do_ref[*cols], R, p.parts, NT)
    if not p.delta_rule:
      return dP, dA, dbeta
    dY = p.dY_ref[*cols]
    dA -= dot(dY, R, p.parts, NT)
    dY = dY.astype(F32)
    p.dv_ref[*cols] = (dY * p.beta[:, None]).astype(p.dv_ref.dtype)
    return dP, dA, dbeta + jnp.sum(dY * p.v_ref[*cols].astype(F32), axis=1)

  square = p.zeros(p.chunk)
  carry = (square, square if p.delta_rule else None, p.zeros() if p.delta_rule else None)
  return lax.fori_loop(0, p.value_blocks, over_values, carry)


def launch_per_chunk(
  kernel, body, inputs, outputs, *, chunk, per_channel, tile, interpret, **options
):
  """Run body(ChunkProgram, **options) for every chunk and head; return the outputs by name.

  Args:
    inputs: name -> array or None, named like the refs of `ChunkProgram`; v is one of them.
    outputs: name -> anything with its shape and dtype.
  """
  k, v = inputs.get("k"), inputs["v"]
  B, L, Hv, dv = v.shape
  sizes = dict(
    per_channel=per_channel,
    group=1 if k is None else Hv // k.shape[2],
    chunk=chunk,
    block_k=tile.block_k if k is None else min(tile.block_k, k.shape[-1]),
    block_v=min(tile.block_v, dv),
  )
  return launch_kernel(
    kernel,
    lambda **refs: body(ChunkProgram(**refs, **sizes), **options),
    inputs,
    outputs,
    grid=(L // chunk, Hv, B),
    tile=tile,
    interpret=interpret,
    delta_rule=inputs["beta"] is not None,
  )


def key_gradient_shapes(k, v):
  """Return the shapes of dq and dk per value head; float32 if they are to be summed over heads."""
  (B, L, H, dk), Hv = k.shape, v.shape[2]
  shape = jax.ShapeDtypeStruct((B, L, Hv, dk), k.dtype if Hv == H else F32)
  return dict(dq=shape, dk=shape)


def input_gradients(k, dq, dk, dv, beta, dbeta, g, dg):
  """Return (dq, dk, dv, dbeta, dg) in the input dtypes, dq and dk summed over shared key heads."""
  B, L, H, size = k.shape
  if dq.shape[2] > H:
    dq, dk = (x.reshape(B, L, H, -1, size).sum(3).astype(k.dtype) for x in (dq, dk))
  dbeta = None if beta is None else dbeta.astype(beta.dtype)
  return dq, dk, dv, dbeta, None if g is None else dg.astype(g.dtype)
