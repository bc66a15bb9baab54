"""One decoding step on NVIDIA GPUs: the state is read once and written once."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common.gpu import launch
from pallas_kernels.common.platform import require_platform
from pallas_kernels.common.tiling import pad_axis
from pallas_kernels.delta_rule.checks import check_inputs
from pallas_kernels.delta_rule.pallas_gpu.decay import pick

F32 = jnp.float32
BLOCK_ELEMENTS = 4096  # of S per program: 32 registers a thread at 4 warps


def _body(layer_ref, q_ref, k_ref, v_ref, *refs, given, group, scale, block_v):
  # q, k [B H dk], v [B Hv dv], beta? [B Hv], g? [B Hv] or [B Hv dk], S [layers B Hv dk dv]
  # -> o [B Hv dv], S
  layer = layer_ref[0]
  beta_ref, g_ref, (S_ref, o_ref, S_out_ref) = pick(refs, *given)
  j, h, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
  hk = lax.div(h, lax.full_like(h, group))
  cols = pl.ds(j * block_v, block_v)
  S = S_ref[layer, b, h, :, cols]
  if g_ref is not None:
    one = len(g_ref.shape) == 2
    decay = jnp.exp((g_ref[b, h] if one else g_ref[b, h, :]).astype(F32))
    S = S * (decay if one else decay[:, None])
  k = k_ref[b, hk, :].astype(F32)
  v = v_ref[b, h, cols].astype(F32)
  r = v
  if beta_ref is not None:
    r = beta_ref[b, h].astype(F32) * (v - jnp.sum(k[:, None] * S, axis=0))
  S = S + k[:, None] * r[None, :]
  S_out_ref[layer, b, h, :, cols] = S
  o = scale * jnp.sum(q_ref[b, hk, :].astype(F32)[:, None] * S, axis=0)
  o_ref[b, h, cols] = o.astype(o_ref.dtype)


def delta_rule_step_gpu(
  q_t, k_t, v_t, beta_t, S, g_t=None, *, layer=None, scale=1.0, interpret=False
):
  """S <- e^g S + k beta (v - k e^g S)^T, o = scale q S for one token; returns (o_t, S).

  Of linear attention where beta_t is None: S <- e^g S + k v^T.

  Args:
    q_t, k_t: [B H dk].
    v_t: [B Hv dv].
    beta_t, g_t: [B Hv], of key channels g_t [B Hv dk]; either may be None.
    S: [B Hv dk dv] float32, its buffer is reused for the new state; or with a `layer`
      [layers B Hv dk dv], of which that one is read and overwritten.
  """
  check_inputs(q_t, k_t, v_t, beta_t, g_t, S, channels=True)
  name = "linear_attention_step" if beta_t is None else "delta_rule_step"
  q_t = q_t if interpret else require_platform(q_t, "cuda", f"{name}_gpu")
  H, dk = k_t.shape[1:]
  B, Hv, dv = v_t.shape
  pk, pv = pl.next_power_of_2(dk), pl.next_power_of_2(dv)
  if (pk, pv) != (dk, dv):
    # Sizes that are no powers of two cost a padded copy of the state.
    one = S if layer is None else lax.dynamic_index_in_dim(S, layer, keepdims=False)
    q_t, k_t = pad_axis(q_t, 2, pk), pad_axis(k_t, 2, pk)
    v_t, one = pad_axis(v_t, 2, pv), pad_axis(pad_axis(one, 2, pk), 3, pv)
    g_t = pad_axis(g_t, 2, pk) if g_t is not None and g_t.ndim == 3 else g_t
    o_t, one = delta_rule_step_gpu(
      q_t, k_t, v_t, beta_t, one, g_t, scale=scale, interpret=interpret
    )
    one = one[:, :, :dk, :dv]
    S = one if layer is None else lax.dynamic_update_index_in_dim(S, one, layer, 0)
    return o_t[..., :dv], S
  block_v = max(1, min(dv, BLOCK_ELEMENTS // dk))
  stack = S[None] if layer is None else S
  number = jnp.zeros((1,), jnp.int32) if layer is None else layer.astype(jnp.int32).reshape(1)
  args = [x for x in (number, q_t, k_t, v_t, beta_t, g_t, stack) if x is not None]
  given = [x is not None for x in (beta_t, g_t)]
  o_t, stack = launch(
    functools.partial(_body, given=given, group=Hv // H, scale=scale, block_v=block_v),
    name,
    args,
    [jax.ShapeDtypeStruct(v_t.shape, v_t.dtype), jax.ShapeDtypeStruct(stack.shape, F32)],
    grid=(dv // block_v, Hv, B),
    warps=4,
    interpret=interpret,
    aliases={len(args) - 1: 1},  # the state is changed where it lies
  )
  return o_t, stack[0] if layer is None else stack


def linear_attention_step_gpu(q_t, k_t, v_t, S, g_t=None, **options):
  """One token of linear attention: `delta_rule_step_gpu` that delta_rule nothing."""
  return delta_rule_step_gpu(q_t, k_t, v_t, None, S, g_t, **options)
