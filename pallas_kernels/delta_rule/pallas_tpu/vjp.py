"""Delta rule and linear attention on TPU: layouts, padding and derivatives of the kernels."""

import functools

import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.differentiable import KernelVJP, call_kernel
from pallas_kernels.common.platform import require_platform
from pallas_kernels.common.tiling import pad_axis, round_up
from pallas_kernels.delta_rule.checks import FAR_BELOW, check_inputs
from pallas_kernels.delta_rule.pallas_tpu.backward import backward
from pallas_kernels.delta_rule.pallas_tpu.forward import forward
from pallas_kernels.delta_rule.pallas_tpu.tiles import Problem, choose_tile, padded_size
from pallas_kernels.delta_rule.ut import reference

F32 = jnp.float32


def _pack_rows(tile, shape, beta, g, segment_ids):
  """Return [B/sequences, N, J, rows, C] float32: beta, log decays, segments per token and state."""
  B, Lp, Hv = shape
  M, N, J = tile.sequences, Lp // tile.chunk, Hv // tile.heads

  def rows(x):
    # [B, Lp, J*n] to [B/M, N, J, M*n, C]
    x = x.astype(F32).reshape(B // M, M, N, tile.chunk, J, -1).transpose(0, 2, 4, 1, 5, 3)
    return x.reshape(B // M, N, J, -1, tile.chunk)

  out = [] if beta is None else [rows(beta)]
  if tile.gate_rows:
    # Within a chunk b is above -2^14, where float32 differences are accurate to 2e-3, enough for
    # bfloat16 inputs. For float32 inputs the coarse part, sums of multiples of 2^-8, is exact.
    g = jnp.maximum(rows(g), FAR_BELOW)
    coarse = jnp.round(g * 256.0) / 256.0
    parts = [g] if tile.gate_rows == 1 else [coarse, g - coarse]
    out += [jnp.cumsum(x, -1) for x in parts]
  if segment_ids is not None:
    before = jnp.concatenate([segment_ids[:, :1], segment_ids[:, :-1]], axis=1)
    change = (segment_ids != before)[:, :, None]
    out.append(jnp.cumsum(rows(jnp.broadcast_to(change, (B, Lp, J))), -1))
  return jnp.concatenate(out, axis=3) if out else None


def _layout(x, Lp, d):
  """Pad [B, L, H, .] with zeros and reshape it to [B, Lp, H*d]."""
  B, _, H, _ = x.shape
  return pad_axis(pad_axis(x, 3, d), 1, Lp).reshape(B, Lp, H * d)


def _inputs(tile, q, k, v, beta, g, S0, segment_ids):
  Lp = round_up(q.shape[1], tile.chunk)
  # Padded tokens have beta = 0 and k = 0, and leave the state unchanged.
  beta, g = (None if x is None else pad_axis(x, 1, Lp) for x in (beta, g))
  gate = _layout(g.astype(F32), Lp, tile.dk) if tile.per_channel else None
  segment_ids = None if segment_ids is None else pad_axis(segment_ids, 1, Lp, mode="edge")
  rows = _pack_rows(tile, (v.shape[0], Lp, v.shape[2]), beta, g, segment_ids)
  if S0 is not None:
    S0 = pad_axis(pad_axis(S0.astype(F32), 2, tile.dk), 3, tile.dv)
  q, k, v = _layout(q, Lp, tile.dk), _layout(k, Lp, tile.dk), _layout(v, Lp, tile.dv)
  return q, k, v, rows, gate, S0


def _run(q, k, v, beta, g, S0, segment_ids, *, tile, interpret):
  args = _inputs(tile, q, k, v, beta, g, S0, segment_ids)
  return _outputs(tile, q, v, *forward(*args, tile=tile, interpret=interpret))


def _outputs(tile, q, v, o, S):
  B, L, Hv, dv = v.shape
  o = o.reshape(B, -1, Hv, tile.dv)[:, :L, :, :dv]
  return o, S[:, :, : q.shape[3], :dv]


def _save(q, k, v, beta, g, S0, segment_ids, *, tile, interpret):
  # Residuals besides the inputs: the state before each chunk and X, both in the inputs' dtype, to
  # which the matmuls of the backward pass round them anyway.
  args = _inputs(tile, q, k, v, beta, g, S0, segment_ids)
  o, S, *saved = forward(*args, tile=tile, save=True, interpret=interpret)
  return _outputs(tile, q, v, o, S), (saved[0], saved[1] if tile.delta_rule else None)


def _backward(args, residuals, cotangents, *, tile, interpret):
  q, k, v, beta, g, S0, segment_ids = args
  do, dS = cotangents
  B, L, H, dk = q.shape
  Hv, dv = v.shape[2:]
  qp, kp, vp, rows, gate, _ = _inputs(tile, q, k, v, beta, g, None, segment_ids)
  Lp = qp.shape[1]
  dS = pad_axis(pad_axis(dS.astype(F32), 2, tile.dk), 3, tile.dv)
  dq, dk_, dv_, dS0, drows, dgate = backward(
    qp, kp, vp, rows, gate, *residuals, _layout(do, Lp, tile.dv), dS, tile=tile, interpret=interpret
  )

  def keys(x, like):
    # Programs that share a key head wrote one partial sum each.
    x = x.reshape(B, Lp, H, -1, tile.dk)
    x = x[:, :, :, 0] if x.shape[3] == 1 else x.sum(3)
    return x[:, :L, :, :dk].astype(like.dtype)

  def tokens(x, like):
    # [B/M, N, J, M*heads, C], the layout of _pack_rows, to [B, L, Hv]
    x = x.reshape(*x.shape[:3], tile.sequences, tile.heads, tile.chunk).transpose(0, 3, 1, 5, 2, 4)
    return x.reshape(B, Lp, Hv)[:, :L].astype(like.dtype)

  dbeta = None if beta is None else tokens(drows[:, :, :, : tile.states], beta)
  dg = None
  if tile.per_channel:
    dg = dgate.reshape(B, Lp, Hv, tile.dk)[:, :L, :, :dk].astype(g.dtype)
  elif g is not None:
    # b is the inclusive cumulative sum of g within the chunk.
    dg = tokens(lax.cumsum(drows[:, :, :, -tile.states :], axis=4, reverse=True), g)
  dS0 = None if S0 is None else dS0[:, :, :dk, :dv].astype(S0.dtype)
  dv_ = dv_.reshape(B, Lp, Hv, tile.dv)[:, :L, :, :dv]
  return keys(dq, q), keys(dk_, k), dv_, dbeta, dg, dS0, None


def _reference(q, k, v, beta, g, S0, segment_ids, *, scale, chunk):
  args = (q, k, v, beta, g, S0, segment_ids)
  if g is not None and g.ndim == 4:
    return reference.recurrent(*args, scale=scale)
  chunkwise = reference.linear_attention if beta is None else reference.delta_rule
  return chunkwise(*args, scale=scale, chunk=chunk)


def _apply(q, k, v, beta, g, S0, segment_ids, *, scale, chunk, precision, interpret):
  problem = Problem(
    *q.shape[:3],
    Hv=v.shape[2],
    dk=padded_size(q.shape[3]),
    dv=padded_size(v.shape[3]),
    dtype=q.dtype,
    delta_rule=beta is not None,
    gate="none" if g is None else "head" if g.ndim == 3 else "channel",
    packed=segment_ids is not None,
  )
  tile = choose_tile(problem, scale=float(scale), chunk=chunk, inverse_precision=precision)
  q = q if interpret else require_platform(q, "tpu", f"{tile.name}_tpu")
  options = dict(tile=tile, interpret=interpret)
  kernel = KernelVJP(
    forward=functools.partial(_run, **options),
    forward_saving=functools.partial(_save, **options),
    backward=functools.partial(_backward, **options),
    reference=functools.partial(_reference, scale=float(scale), chunk=tile.chunk),
    name=f"{tile.name}_tpu",
  )
  return call_kernel(kernel, q, k, v, beta, g, S0, segment_ids)


def delta_rule_tpu(
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
  interpret=False,
):
  """Apply the delta rule to a sequence and return (o, S_L).

  o_t = scale q_t S_t with S_t = S- + k_t beta_t (v_t - k_t S-), S- = e^{g_t} S_{t-1}.

  Args:
    q, k: [B, L, H, dk], bfloat16 or float32.
    v: [B, L, Hv, dv] of the same dtype; value head j uses key head j // (Hv // H).
    beta: [B, L, Hv].
    g: log decay <= 0, per head [B, L, Hv] or per channel [B, L, Hv, dk]; or None.
    S0: [B, Hv, dk, dv] float32, or None for zeros.
    segment_ids: [B, L] int32 or None; the state is reset to zero where the id changes.
    chunk: tokens per chunk, a power of two >= 16; None for 128.
    inverse_precision: of the matmuls that merge the 16 x 16 blocks of (I + A)^-1: "bf16", "bf16x3",
      "bf16x6" (1, 3, 6 bfloat16 passes) or "substitution" (no merges). None: bf16x6 for float32,
      bf16 for bfloat16.
    interpret: True or pltpu.InterpretParams() to run on CPU.

  Returns:
    o [B, L, Hv, dv] in v's dtype and S [B, Hv, dk, dv] float32.
  """
  check_inputs(q, k, v, beta, g, S0, channels=True)
  options = dict(scale=scale, chunk=chunk, precision=inverse_precision, interpret=interpret)
  return _apply(q, k, v, beta, g, S0, segment_ids, **options)


def linear_attention_tpu(
  q, k, v, g=None, S0=None, segment_ids=None, *, scale=1.0, chunk=None, interpret=False
):
  """Apply linear attention to a sequence and return (o, S_L).

  o_t = scale q_t S_t with S_t = e^{g_t} S_{t-1} + k_t v_t. Arguments as in `delta_rule_tpu`.
  """
  check_inputs(q, k, v, None, g, S0, channels=True)
  options = dict(scale=scale, chunk=chunk, precision=None, interpret=interpret)
  return _apply(q, k, v, None, g, S0, segment_ids, **options)
