"""UT transform of every chunk on NVIDIA GPUs (Pallas, Triton lowering), and its gradients."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common.bf16 import parts_for
from pallas_kernels.common.differentiable import KernelVJP, call_kernel
from pallas_kernels.delta_rule.pallas_gpu.decay import (
  gate_gradient_from_rows,
  gate_gradient_from_scores,
  load_chunk,
  program_ids,
  strict_lower,
)
from pallas_kernels.delta_rule.pallas_gpu.inverse import (
  inverse_shape,
  load_inverse,
  store_inverse,
  times_inverse,
)
from pallas_kernels.delta_rule.pallas_gpu.launch import launch_kernel
from pallas_kernels.delta_rule.pallas_gpu.matmul import F32, NT, TN, dot, gram
from pallas_kernels.delta_rule.pallas_gpu.tiles import tile_for
from pallas_kernels.delta_rule.ut import reference


def _blocks(size, block):
  block = min(size, block)
  return [pl.ds(i, block) for i in range(0, size, block)]


def _forward_body(
  k_ref, v_ref, beta_ref, X_ref, W_ref, U_ref, g_ref=None, segments_ref=None,
  *, group, chunk, tile, precision,
):  # fmt: skip
  # k [B L H dk], v [B L Hv dv], beta, g [B L Hv], segments [B L]
  # -> X [N B Hv matrices C C], W [N B Hv C dk], U [N B Hv C dv]
  n, h, b, hk = program_ids(group)
  parts = parts_for(k_ref.dtype)
  rows, beta, zero, iotas, decay = load_chunk(
    k_ref, beta_ref, g_ref, segments_ref, n, b, h, hk, chunk
  )
  key_blocks = _blocks(k_ref.shape[-1], tile.block_k)
  grams = gram(k_ref, b, rows, hk, tile.block_k)
  factors = decay.score_factors() * beta[:, None]
  X = store_inverse(X_ref, (n, b, h), grams, factors, precision, iotas, zero)
  row_scale = beta if decay.start is None else beta * decay.start
  for cols in key_blocks:
    K = k_ref[b, rows, hk, cols].astype(F32) * row_scale[:, None]
    W_ref[n, b, h, :, cols] = times_inverse(X, K, parts).astype(W_ref.dtype)
  for cols in _blocks(v_ref.shape[-1], tile.block_v):
    V = v_ref[b, rows, h, cols].astype(F32) * beta[:, None]
    U_ref[n, b, h, :, cols] = times_inverse(X, V, parts).astype(U_ref.dtype)


def _backward_body(
  k_ref, v_ref, beta_ref, X_ref, W_ref, U_ref, dW_ref, dU_ref, dk_ref, dv_ref, dbeta_ref,
  dg_ref=None, g_ref=None, segments_ref=None, *, group, chunk, tile,
):  # fmt: skip
  # X [N B Hv matrices C C], W, U, dW, dU [N B Hv C .]
  # -> dk [B L Hv dk], dv [B L Hv dv], dbeta, dg [B L Hv]
  n, h, b, hk = program_ids(group)
  parts = parts_for(k_ref.dtype)
  rows, beta, _, iotas, decay = load_chunk(k_ref, beta_ref, g_ref, segments_ref, n, b, h, hk, chunk)
  zeros = jnp.zeros((chunk,), F32)
  square = jnp.zeros((chunk, chunk), F32)
  block_k, block_v = min(tile.block_k, k_ref.shape[-1]), min(tile.block_v, v_ref.shape[-1])
  key_count = k_ref.shape[-1] // block_k
  X = lambda: load_inverse(X_ref, (n, b, h))

  # Loops, not unrolled blocks: fewer addresses and matmul descriptors are live at once.
  def over_values(i, carry):
    dA, dbeta = carry
    cols = pl.ds(i * block_v, block_v)
    dY = times_inverse(X(), dU_ref[n, b, h, :, cols], parts, TN)
    dA -= dot(dY, U_ref[n, b, h, :, cols], parts, NT)
    dv_ref[b, rows, h, cols] = (dY * beta[:, None]).astype(dv_ref.dtype)
    return dA, dbeta + jnp.sum(dY * v_ref[b, rows, h, cols].astype(F32), axis=1)

  def over_correction(i, carry):
    dA, correction = carry
    cols = pl.ds(i * block_k, block_k)
    dY = times_inverse(X(), dW_ref[n, b, h, :, cols], parts, TN)
    dA -= dot(dY, W_ref[n, b, h, :, cols], parts, NT)
    return dA, correction + jnp.sum(dY * k_ref[b, rows, hk, cols].astype(F32), axis=1)

  def over_gram(i, KK):
    K = k_ref[b, rows, hk, pl.ds(i * block_k, block_k)]
    return KK + dot(K, K, parts, NT)

  dA, dbeta = lax.fori_loop(0, v_ref.shape[-1] // block_v, over_values, (square, zeros))
  dA, correction = lax.fori_loop(0, key_count, over_correction, (dA, zeros))
  correction = correction if decay.start is None else correction * decay.start
  dA = strict_lower(dA * decay.score_factors(), iotas)
  KK = lax.fori_loop(0, key_count, over_gram, square)
  dbeta_ref[b, rows, h] = dbeta + correction + jnp.sum(dA * KK, axis=1)
  dKK = dA * beta[:, None]
  if dg_ref is not None:
    dg = gate_gradient_from_rows(correction * beta, None, None, iotas)
    dg_ref[b, rows, h] = dg + gate_gradient_from_scores(dKK * KK, parts, iotas)
  dKK = dKK.astype(k_ref.dtype)
  row_scale = beta if decay.start is None else beta * decay.start

  def over_keys(i, _):
    cols = pl.ds(i * block_k, block_k)
    K = k_ref[b, rows, hk, cols]
    # X^T dW is recomputed: one matmul instead of C dk live registers.
    dK = times_inverse(X(), dW_ref[n, b, h, :, cols], parts, TN) * row_scale[:, None]
    dK += dot(dKK, K, parts) + dot(dKK, K, parts, TN)
    dk_ref[b, rows, h, cols] = dK.astype(dk_ref.dtype)

  lax.fori_loop(0, key_count, over_keys, None)


def ut_transform(
  k, v, beta, g=None, segments=None, *, chunk, inverse_precision, tile=None, interpret=False
):
  """Return X = (I + A)^-1, W = X (beta e^b K), U = X (beta V) of every chunk, as [N B Hv C .].

  X is [N B Hv matrices C C]: for float32 the sum of two matrices. `segments` [B L] numbers the
  segments of a sequence from 0. L is a multiple of the chunk, head sizes are powers of two >= 16.
  Outputs have k's dtype.
  """
  B, L, H, dk = k.shape
  Hv, dv = v.shape[2:]
  N = L // chunk
  tile = tile or tile_for("ut_fwd", k)
  body = functools.partial(
    _forward_body, group=Hv // H, chunk=chunk, tile=tile, precision=inverse_precision
  )
  found = launch_kernel(
    "ut_fwd",
    body,
    dict(k=k, v=v, beta=beta, g=g, segments=segments),
    dict(
      X=inverse_shape(N, B, Hv, chunk, k.dtype),
      W=jax.ShapeDtypeStruct((N, B, Hv, chunk, dk), k.dtype),
      U=jax.ShapeDtypeStruct((N, B, Hv, chunk, dv), k.dtype),
    ),
    grid=(N, Hv, B),
    tile=tile,
    interpret=interpret,
  )
  return found["X"], found["W"], found["U"]


def ut_transform_bwd(
  k, v, beta, g, segments, X, W, U, dW, dU, *, chunk, tile=None, interpret=False
):
  """Return the gradients (dk, dv, dbeta, dg) of ut_transform, dk summed over shared key heads."""
  B, L, H, dk = k.shape
  Hv = v.shape[2]
  group = Hv // H
  tile = tile or tile_for("ut_bwd", k)
  per_token = jax.ShapeDtypeStruct((B, L, Hv), F32)
  outputs = dict(
    dk=jax.ShapeDtypeStruct((B, L, Hv, dk), k.dtype if group == 1 else F32), dv=v, dbeta=per_token
  )
  if g is not None:
    outputs["dg"] = per_token
  found = launch_kernel(
    "ut_bwd",
    functools.partial(_backward_body, group=group, chunk=chunk, tile=tile),
    dict(k=k, v=v, beta=beta, g=g, segments=segments, X=X, W=W, U=U, dW=dW, dU=dU),
    outputs,
    grid=(L // chunk, Hv, B),
    tile=tile,
    interpret=interpret,
  )
  dK = found["dk"]
  dK = dK.reshape(B, L, H, group, dk).sum(3).astype(k.dtype) if group > 1 else dK
  dg = found["dg"].astype(g.dtype) if g is not None else None
  return dK, found["dv"], found["dbeta"].astype(beta.dtype), dg


class Options(NamedTuple):
  chunk: int
  inverse_precision: str
  interpret: bool


def transform(k, v, beta, g, segments, options):
  """Return (W, U) of every chunk, differentiable; the backward pass recomputes the inverse."""
  kernel = functools.partial(ut_transform, **options._asdict())

  def backward(args, _, cotangents):
    chunk, interpret = options.chunk, options.interpret
    grads = ut_transform_bwd(*args, *kernel(*args), *cotangents, chunk=chunk, interpret=interpret)
    return *grads, None

  return differentiable_transform(kernel, backward, options.chunk, k, v, beta, g, segments)


def differentiable_transform(kernel, backward, chunk, *args):
  """Return (W, U) of kernel(*args) = (X, W, U), with the VJP backward(args, (), cotangents)."""
  run = lambda *args: tuple(kernel(*args)[1:])
  kernels = KernelVJP(
    forward=run,
    forward_saving=lambda *args: (run(*args), ()),
    backward=backward,
    reference=functools.partial(reference.transform, chunk=chunk),
    name="ut_transform",
    out_batch_axis=1,
  )
  return call_kernel(kernels, *args)
