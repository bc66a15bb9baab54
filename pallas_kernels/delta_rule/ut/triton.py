"""Delta rule with the UT transform as a Triton kernel, called through jax-triton.

An alternative in case JAX drops the Pallas-Triton lowering. Only the forward pass is a kernel; its
backward pass is XLA. jax-triton has no interpret mode on CPU.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.common import bf16
from pallas_kernels.common.platform import require_platform
from pallas_kernels.delta_rule.checks import check_inputs
from pallas_kernels.delta_rule.pallas_gpu.tiles import clamp_chunk
from pallas_kernels.delta_rule.ut import scan
from pallas_kernels.delta_rule.ut.pallas import differentiable_transform

F32 = jnp.float32


def ut_transform(
  k, v, beta, g=None, segments=None, *, chunk, inverse_precision, compute_capability=None
):
  """Return X = (I + A)^-1, W = X (beta e^b K), U = X (beta V), like `ut.pallas.ut_transform`."""
  try:
    from pallas_kernels.delta_rule.ut import triton_kernel
  except ImportError as error:
    raise ImportError(
      'delta_rule_triton requires jax-triton and triton: pip install "jax-triton==0.3.1" triton'
    ) from error
  return triton_kernel.ut_transform(
    require_platform(k, "cuda", "delta_rule_triton"), v, beta, g, segments,
    chunk=chunk,
    inverse_precision=inverse_precision,
    compute_capability=compute_capability,
  )  # fmt: skip


def ut_bwd_xla(k, v, beta, g, segments, X, W, U, dW, dU):
  """Return the gradients (dk, dv, dbeta, dg) of ut_transform by XLA, in the input dtypes."""
  B, L, H, dk = k.shape
  N, _, Hv, _, C, _ = X.shape
  einsum = scan.einsum
  K = jnp.repeat(scan.to_chunks(k, C), Hv // H, axis=2)
  V, betas = scan.to_chunks(v, C), scan.to_chunks(beta.astype(F32), C)[..., None]
  decays = lambda g: scan.chunk_decays(g, segments, N, B, C)[:2]
  if g is None:
    D, start = decays(None)
  else:
    (D, start), decays_vjp = jax.vjp(decays, g)
  start = start[..., None]
  dYk = einsum("nbhpij,nbhid->nbhjd", X, dW)
  dYv = einsum("nbhpij,nbhid->nbhjd", X, dU)
  outer = lambda a, b: einsum("nbhid,nbhjd->nbhij", a.astype(k.dtype), b)
  dA = jnp.tril(-outer(dYk, W) - outer(dYv, U), -1)
  KK = outer(K, K)
  correction = jnp.sum(dYk * K, axis=-1, keepdims=True)
  dbeta = jnp.sum(dYv * V, axis=-1, keepdims=True) + correction * start
  dbeta += jnp.sum(dA * KK * D, axis=-1, keepdims=True)
  dKK = dA * betas * D
  dK = dYk * betas * start
  dK += einsum("nbhij,nbhjd->nbhid", (dKK + jnp.swapaxes(dKK, -1, -2)).astype(k.dtype), K)
  dg = None
  if g is not None:
    (dg,) = decays_vjp((dA * betas * KK, (correction * betas)[..., 0]))

  def to_tokens(x):
    return jnp.moveaxis(x, (0, 3), (1, 2)).reshape(B, L, Hv, -1)

  dk_sum = to_tokens(dK).reshape(B, L, H, Hv // H, dk).sum(3).astype(k.dtype)
  dv = to_tokens(dYv * betas).astype(v.dtype)
  return dk_sum, dv, to_tokens(dbeta)[..., 0].astype(beta.dtype), dg


def delta_rule_triton(
  q,
  k,
  v,
  beta,
  g=None,
  S0=None,
  segment_ids=None,
  *,
  scale=1.0,
  chunk=None,
  inverse_precision=None,
  compute_capability=None,
):
  """Apply the delta rule to a sequence and return (o, S_L); arguments as in `delta_rule_gpu`.

  Args:
    compute_capability: of the GPU to compile for, e.g. 90; None for the GPU present.
  """
  check_inputs(q, k, v, beta, g, S0)
  chunk = clamp_chunk(chunk, k.dtype)
  precision = bf16.inverse_precision(inverse_precision, k.dtype)
  kernel = functools.partial(
    ut_transform, chunk=chunk, inverse_precision=precision, compute_capability=compute_capability
  )
  backward = lambda args, _, cotangents: (*ut_bwd_xla(*args, *kernel(*args), *cotangents), None)
  transform = lambda *chunks: differentiable_transform(kernel, backward, chunk, *chunks)
  return scan.delta_rule_by_scan(
    q, k, v, beta, g, S0, segment_ids, scale=float(scale), chunk=chunk, transform=transform
  )
