"""One decoding step on NVIDIA GPUs: the state is read once and written once, in place."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common.platform import require_platform
from pallas_kernels.common.tiling import pad_axis
from pallas_kernels.delta_rule.checks import check_inputs
from pallas_kernels.delta_rule.pallas_gpu.launch import launch_kernel
from pallas_kernels.delta_rule.pallas_gpu.tiles import DeltaTileGPU

F32 = jnp.float32
BLOCK_ELEMENTS = 4096  # of S per program: 32 registers per thread with 4 warps


def _body(
  layer_ref, q_ref, k_ref, v_ref, S_ref, o_ref, S_out_ref, beta_ref=None, g_ref=None,
  *, group, scale, block_v,
):  # fmt: skip
  # layer [1], q, k [B H dk], v [B Hv dv], beta [B Hv], g [B Hv] or [B Hv dk],
  # S [layers B Hv dk dv] -> o [B Hv dv], S
  layer = layer_ref[0]
  j, h, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
  hk = lax.div(h, lax.full_like(h, group))
  cols = pl.ds(j * block_v, block_v)
  S = S_ref[layer, b, h, :, cols]
  if g_ref is not None:
    per_head = len(g_ref.shape) == 2
    decay = jnp.exp((g_ref[b, h] if per_head else g_ref[b, h, :]).astype(F32))
    S = S * (decay if per_head else decay[:, None])
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
  """Apply one step of the delta rule and return (o_t, S).

  S <- e^g S + k beta (v - k e^g S)^T, o = scale q S. Linear attention if beta_t is None:
  S <- e^g S + k v^T.

  Args:
    q_t, k_t: [B H dk].
    v_t: [B Hv dv].
    beta_t: [B Hv] or None.
    g_t: log decay, per head [B Hv] or per channel [B Hv dk]; or None.
    S: [B Hv dk dv] float32, its buffer is reused for the new state; with `layer`
      [layers B Hv dk dv], of which only that layer is read and overwritten.
    layer: int32 scalar or None.
  """
  check_inputs(q_t, k_t, v_t, beta_t, g_t, S, channels=True)
  name = "linear_attention_step" if beta_t is None else "delta_rule_step"
  q_t = q_t if interpret else require_platform(q_t, "cuda", f"{name}_gpu")
  H, dk = k_t.shape[1:]
  B, Hv, dv = v_t.shape
  pk, pv = pl.next_power_of_2(dk), pl.next_power_of_2(dv)
  if (pk, pv) != (dk, dv):
    # Head sizes that are not powers of two cost a padded copy of the state.
    S_layer = S if layer is None else lax.dynamic_index_in_dim(S, layer, keepdims=False)
    q_t, k_t = pad_axis(q_t, 2, pk), pad_axis(k_t, 2, pk)
    v_t, S_layer = pad_axis(v_t, 2, pv), pad_axis(pad_axis(S_layer, 2, pk), 3, pv)
    g_t = pad_axis(g_t, 2, pk) if g_t is not None and g_t.ndim == 3 else g_t
    o_t, S_layer = delta_rule_step_gpu(
      q_t, k_t, v_t, beta_t, S_layer, g_t, scale=scale, interpret=interpret
    )
    S_layer = S_layer[:, :, :dk, :dv]
    S = S_layer if layer is None else lax.dynamic_update_index_in_dim(S, S_layer, layer, 0)
    return o_t[..., :dv], S
  block_v = max(1, min(dv, BLOCK_ELEMENTS // dk))
  stack = S[None] if layer is None else S
  index = jnp.zeros((1,), jnp.int32) if layer is None else layer.astype(jnp.int32).reshape(1)
  found = launch_kernel(
    "step",
    functools.partial(_body, group=Hv // H, scale=scale, block_v=block_v),
    dict(layer=index, q=q_t, k=k_t, v=v_t, beta=beta_t, g=g_t, S=stack),
    dict(o=v_t, S_out=jax.ShapeDtypeStruct(stack.shape, F32)),
    grid=(dv // block_v, Hv, B),
    tile=DeltaTileGPU(dk, block_v, warps=4),
    interpret=interpret,
    delta_rule=beta_t is not None,
    aliases={"S": "S_out"},
  )
  return found["o"], found["S_out"][0] if layer is None else found["S_out"]


def linear_attention_step_gpu(q_t, k_t, v_t, S, g_t=None, **options):
  """Apply one step of linear attention; arguments as in `delta_rule_step_gpu`."""
  return delta_rule_step_gpu(q_t, k_t, v_t, None, S, g_t, **options)
