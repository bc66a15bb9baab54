"""Mamba-2 (SSD): linear attention with a per-head (scalar) decay; heads share queries and keys."""

from typing import ClassVar

import jax
import jax.numpy as jnp

from deltanet_jax.config import MixerConfig, check, check_positive, setting, settings
from deltanet_jax.mixers.base import check_conv
from deltanet_jax.mixers.layers import Linear, ShortConv, dt_bias, merge_heads, param, split_heads
from deltanet_jax.mixers.matrix_state import LinearAttentionMixer
from deltanet_jax.ops import rms_norm
from deltanet_jax.ops.checks import check_chunk
from deltanet_jax.ops.dtypes import accum_dtype


@settings
class Mamba2Config(MixerConfig):
  kind: ClassVar[str] = "mamba2"

  expand: int = setting(2, "Number of channels over the model width.")
  head_size: int = setting(64, "Channels per head.")
  state_size: int = setting(128, "State size per channel.")
  groups: int = setting(1, "Groups of heads; the heads of a group share B and C.")
  conv: int = setting(4, "Kernel width of the short convolutions; 0: none.")
  chunk: int = setting(64, "Chunk size of the chunkwise form in tokens.")

  def validate(self):
    check_positive(self, "expand", "head_size", "state_size", "groups")
    check_conv(self.conv)
    check_chunk(self.chunk)


class Mamba2(LinearAttentionMixer):
  """S_t = e^{dt_t A} S_{t-1} + B_t^T (dt_t u_t), y_t = C_t S_t + D u_t, A and D one per head."""

  Config = Mamba2Config
  recurrence = "S_t = γ_t S_{t-1} + v_t k_tᵀ"
  readout = "o_t = S_t q_t"

  def __init__(self, cfg: Mamba2Config, width: int, *, eps: float = 1e-6, std: float = 0.02, rngs):
    self.cfg, self.eps = cfg, eps
    d, G = cfg.expand * width, cfg.groups
    self.heads, self.key_size, self.value_size = H, N, _ = (
      d // cfg.head_size,
      cfg.state_size,
      cfg.head_size,
    )
    check(
      d % cfg.head_size == 0 and H % G == 0,
      f"{d} channels (expand * width) do not divide into heads of {cfg.head_size} and {G} equal"
      " groups of heads: change head_size or groups.",
    )
    # The original has one joint projection; separate ones can be sharded differently.
    make = lambda size, axis: Linear((width, size), ("embed", axis), std=std, rngs=rngs)
    self.gate, self.value = make(d, "heads"), make(d, "heads")
    self.BC, self.dt = make(2 * G * N, None), make(H, None)
    make = lambda size, axis: ShortConv(cfg.conv, size, axis, std=std, rngs=rngs, bias=True)
    self.value_conv = make(d, "heads") if cfg.conv else None
    self.BC_conv = make(2 * G * N, None) if cfg.conv else None
    self.dt_bias = param(dt_bias(rngs, (H,)), None)
    A = jax.random.uniform(rngs.params(), (H,), jnp.float32, 1.0, 16.0)
    self.A_log = param(jnp.log(A), None)
    self.D = param(jnp.ones(H), None)
    self.scale = param(jnp.ones(d), "heads")
    self.out = Linear((d, width), ("heads", "embed"), std=std, rngs=rngs)

  def init_state(self, batch, max_length, dtype):
    S = jnp.zeros((batch, self.heads, self.key_size, self.value_size), accum_dtype(dtype))
    if not self.cfg.conv:
      return dict(S=S)
    convs = dict(value_conv=self.value_conv, BC_conv=self.BC_conv)
    return dict(S=S) | {name: conv.init_state(batch, dtype) for name, conv in convs.items()}

  def mix(self, x, segment_ids, state):
    accum, new = accum_dtype(x.dtype), {}
    u, BC = self.value(x), self.BC(x)
    if self.cfg.conv:
      before = (None, None) if state is None else (state["value_conv"], state["BC_conv"])
      u, new["value_conv"] = self.value_conv(u, before[0], segment_ids)
      BC, new["BC_conv"] = self.BC_conv(BC, before[1], segment_ids)
    B, C = jnp.split(jax.nn.silu(BC), 2, axis=-1)
    B, C = (split_heads(y, self.cfg.groups) for y in (B, C))
    u = split_heads(jax.nn.silu(u), self.heads)
    over_tokens = lambda weight: weight[...].astype(accum)[None, None]
    dt = jax.nn.softplus(self.dt(x).astype(accum) + over_tokens(self.dt_bias))
    g = -jnp.exp(over_tokens(self.A_log)) * dt
    v = (dt[..., None] * u.astype(accum)).astype(x.dtype)
    y, new["S"] = self.run(C, B, v, g, segment_ids, state, scale=1.0)
    y = y + over_tokens(self.D)[..., None].astype(x.dtype) * u
    return self.output(merge_heads(y), x), None if state is None else new

  def output(self, y, x):
    """Return y `[B L D]`: gate, RMSNorm over the channels of each group, output projection."""
    y = y * jax.nn.silu(self.gate(x))
    size = y.shape[-1] // self.cfg.groups
    y = rms_norm(y, jnp.ones((size,), y.dtype), self.eps)
    return self.out(y * self.scale[...].astype(y.dtype)[None, None])
