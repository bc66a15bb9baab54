"""Twin of the UT-transform kernel in Triton proper, called through jax-triton.

The way on when JAX drops the Pallas-Triton lowering. Only the forward is a kernel; its
backward is plain XLA. jax-triton itself cannot run interpreted on a CPU.
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
  """X = (I + A)^-1, W = X (beta e^b K), U = X (beta V): as `ut.pallas` has it."""
  try:
    from pallas_kernels.delta_rule.ut import triton_kernel
  except ImportError as error:
    raise ImportError(
      'implementation="triton" needs jax-triton and triton: pip install "jax-triton==0.3.1" triton'
    ) from error
  return triton_kernel.ut_transform(
    require_platform(k, "cuda", "delta_rule_triton"), v, beta, g, segments,
    chunk=chunk,
    inverse_precision=inverse_precision,
    compute_capability=compute_capability,
  )  # fmt: skip


def ut_bwd_xla(k, v, beta, g, segments, X, W, U, dW, dU):
  """Gradients (dk, dv, dbeta, dg) of ut_transform in plain XLA, in the inputs' dtypes."""
  B, L, H, dk = k.shape
  N, _, Hv, _, C, _ = X.shape
  einsum = scan.einsum
  K = jnp.repeat(scan.by_chunks(k, C), Hv // H, axis=2)
  V, betas = scan.by_chunks(v, C), scan.by_chunks(beta.astype(F32), C)[..., None]
  decays = lambda g: scan.chunk_decays(g, segments, N, B, C)[:2]
  if g is None:
    inside, start = decays(None)
  else:
    (inside, start), decays_vjp = jax.vjp(decays, g)
  start = start[..., None]
  dYk = einsum("nbhpij,nbhid->nbhjd", X, dW)
  dYv = einsum("nbhpij,nbhid->nbhjd", X, dU)
  outer = lambda a, b: einsum("nbhid,nbhjd->nbhij", a.astype(k.dtype), b)
  dA = jnp.tril(-outer(dYk, W) - outer(dYv, U), -1)
  G = outer(K, K)
  erased = jnp.sum(dYk * K, axis=-1, keepdims=True)
  dbeta = jnp.sum(dYv * V, axis=-1, keepdims=True) + erased * start
  dbeta += jnp.sum(dA * G * inside, axis=-1, keepdims=True)
  dG = dA * betas * inside
  dK = dYk * betas * start
  dK += einsum("nbhij,nbhjd->nbhid", (dG + jnp.swapaxes(dG, -1, -2)).astype(k.dtype), K)
  dg = None
  if g is not None:
    (dg,) = decays_vjp((dA * betas * G, (erased * betas)[..., 0]))

  def by_tokens(x):
    return jnp.moveaxis(x, (0, 3), (1, 2)).reshape(B, L, Hv, -1)

  dk_sum = by_tokens(dK).reshape(B, L, H, Hv // H, dk).sum(3).astype(k.dtype)
  dv = by_tokens(dYv * betas).astype(v.dtype)
  return dk_sum, dv, by_tokens(dbeta)[..., 0].astype(beta.dtype), dg


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
  """The delta rule over a sequence, (o, S), intra-chunk step in Triton; see delta_rule_gpu.

  Args:
    compute_capability: of the GPU to compile for, e.g. 90; None asks the GPU present.
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
