"""One program per (chunk, head), all of them in parallel: what the kernels of gradients share."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common.bf16 import parts_for
from pallas_kernels.delta_rule.pallas_gpu.decay import load_chunk, program_ids
from pallas_kernels.delta_rule.pallas_gpu.matmul import F32, NT, dot
from pallas_kernels.delta_rule.pallas_gpu.tiles import call

_NAMES = (
  *("q", "k", "v", "do", "states", "dstates", "g", "segments", "beta", "R", "dY", "dP", "dA"),
  *("dq", "dk", "dv", "dbeta", "dg"),
)


class ChunkProgram:
  """One program of a (chunk, head): its refs by name, where its blocks lie in them, its decays.

  q, k [B L H dk], v, do [B L Hv dv], states, dstates [N B Hv dk dv], g [B L Hv] or [B L Hv dk],
  segments [B L]; beta [B L Hv], R, dY [B L Hv dv] of the delta rule; dP, dA [N B Hv C C];
  dq, dk [B L Hv dk], dv, dbeta, dg like what they are of. None if it was not given. Of beta, not
  its ref but that of the chunk, [C].
  """

  def __init__(self, refs, names, channels, group, chunk, block_k, block_v):
    given = dict(zip(names, refs, strict=True))
    for name in _NAMES:
      setattr(self, name, given.get(name))
    self.delta_rule = self.beta is not None
    self.R = self.R if self.delta_rule else self.v
    self.n, self.h, self.b, self.hk = program_ids(group)
    self.chunk, self.block_k, self.block_v = chunk, block_k, block_v
    self.key_blocks = 0 if self.k is None else self.k.shape[-1] // block_k
    self.value_blocks = self.v.shape[-1] // block_v
    self.parts = parts_for(self.v.dtype)
    some, head = (self.v, self.h) if self.k is None else (self.k, self.hk)
    self.rows, self.beta, self.zero, self.iotas, self.decay = load_chunk(
      some, self.beta, None if channels else self.g, self.segments,
      self.n, self.b, self.h, head, chunk,
    )  # fmt: skip

  def keys(self, i, shared=True):
    """Where block i of the keys' channels lies, of all value heads of a key or of one."""
    return self.b, self.rows, self.hk if shared else self.h, pl.ds(i * self.block_k, self.block_k)

  def values(self, j):
    return self.b, self.rows, self.h, pl.ds(j * self.block_v, self.block_v)

  def state(self, i, j):
    return self.n, self.b, self.h, self.keys(i)[3], self.values(j)[3]

  def row_for(self, number):
    """The row of the batch, as something that the compiler cannot know before the number.

    What is loaded from there in a round of a loop is not kept from before it. Where zero is 1, of
    a NaN, it must still be a row.
    """
    return jnp.minimum(self.b + self.zero * number, self.v.shape[0] - 1)

  def zeros(self, *shape):
    return jnp.zeros((self.chunk, *shape), F32)

  def product(self, rows, columns, i):
    """rows columns^T over all values, for the channels of block i: [C block_k]."""

    # One accumulator per loop: three together spill.
    def add(j, x):
      return x + dot(rows[*self.values(j)], columns[*self.state(i, j)], self.parts, NT)

    return lax.fori_loop(0, self.value_blocks, add, self.zeros(self.block_k))


def of_scores(p):
  """Gradients of Q K^T and K K^T [C C] with their decays, before masks; and dbeta by values.

  Of the delta rule dv as well, which is written.
  """

  def over_values(j, carry):
    dP, dA, dbeta = carry
    cols = p.values(j)
    R = p.R[*cols]
    dP += dot(p.do[*cols], R, p.parts, NT)
    if not p.delta_rule:
      return dP, dA, dbeta
    dY = p.dY[*cols]
    dA -= dot(dY, R, p.parts, NT)
    dY = dY.astype(F32)
    p.dv[*cols] = (dY * p.beta[:, None]).astype(p.dv.dtype)
    return dP, dA, dbeta + jnp.sum(dY * p.v[*cols].astype(F32), axis=1)

  square = p.zeros(p.chunk)
  carry = (square, square if p.delta_rule else None, p.zeros() if p.delta_rule else None)
  return lax.fori_loop(0, p.value_blocks, over_values, carry)


def run(kernel, body, inputs, outputs, *, chunk, channels, tile, interpret, **options):
  """Runs body(program, **options) on every chunk and head; outputs by name.

  Args:
    inputs: name -> array or None, as `ChunkProgram` names them; v is one of them.
    outputs: name -> anything with its shape and dtype.
  """
  inputs = {name: x for name, x in inputs.items() if x is not None}
  k, v, delta_rule = inputs.get("k"), inputs["v"], "beta" in inputs
  B, L, Hv, dv = v.shape
  settings = dict(
    names=(*inputs, *outputs),
    channels=channels,
    group=1 if k is None else Hv // k.shape[2],
    chunk=chunk,
    block_k=tile.block_k if k is None else min(tile.block_k, k.shape[-1]),
    block_v=min(tile.block_v, dv),
  )
  found = call(
    kernel,
    lambda *refs: body(ChunkProgram(refs, **settings), **options),
    inputs.values(),
    [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs.values()],
    grid=(L // chunk, Hv, B),
    tile=tile,
    interpret=interpret,
    delta_rule=delta_rule,
  )
  return dict(zip(outputs, found))


def key_shapes(k, v):
  """dq and dk of every value head; where several share a key, float32 to be summed."""
  (B, L, H, dk), Hv = k.shape, v.shape[2]
  shape = jax.ShapeDtypeStruct((B, L, Hv, dk), k.dtype if Hv == H else F32)
  return dict(dq=shape, dk=shape)


def in_dtypes(k, found, dv, beta, dbeta, g):
  """(dq, dk, dv, dbeta, dg) in the inputs' dtypes, from dq, dk and perhaps dg of `found`."""
  B, L, H, dk = k.shape
  dq, dK = found["dq"], found["dk"]
  if dq.shape[2] > H:
    dq, dK = (x.reshape(B, L, H, -1, dk).sum(3).astype(k.dtype) for x in (dq, dK))
  dbeta = None if beta is None else dbeta.astype(beta.dtype)
  return dq, dK, dv, dbeta, None if g is None else found["dg"].astype(g.dtype)
