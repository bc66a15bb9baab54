"""Mamba: a selective diagonal state space per channel (S6)."""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from deltanet_jax.config import MixerConfig, check_positive, settings
from deltanet_jax.mixers.base import Mixer, check_conv
from deltanet_jax.mixers.layers import Linear, ShortConv, dt_bias, param
from deltanet_jax.ops import selective_scan
from deltanet_jax.ops.checks import check_chunk
from deltanet_jax.ops.dtypes import accum_dtype


@settings
class MambaConfig(MixerConfig):
  kind: ClassVar[str] = "mamba"

  expand: int = 2  # channels over the model's width
  state_size: int = 16  # per channel
  dt_rank: int | None = None  # None: a sixteenth of the width, rounded up
  conv: int = 4
  chunk: int = 64

  def validate(self):
    check_positive(self, "expand", "state_size", "dt_rank")
    check_conv(self.conv)
    check_chunk(self.chunk)


class Mamba(Mixer):
  """h_t = e^{dt_t A} h_{t-1} + dt_t B_t u_t per channel and state, y_t = C_t h_t + D u_t."""

  Config = MambaConfig
  recurrence = "S_t = S_{t-1} ⊙ exp(-(α_t 1ᵀ) ⊙ exp(A)) + (α_t ⊙ v_t) k_tᵀ"
  readout = "o_t = S_t q_t + d ⊙ v_t"
  operator = "selective_scan"
  efficient_form = "associative scan in chunks"

  def __init__(self, cfg: MambaConfig, width: int, *, eps: float = 1e-6, std: float = 0.02, rngs):
    del eps  # there is no norm inside
    self.cfg = cfg
    self.channels = d = cfg.expand * width
    self.rank = r = cfg.dt_rank or math.ceil(width / 16)
    N = cfg.state_size
    self.into = Linear((width, 2 * d), ("embed", "heads"), std=std, rngs=rngs)
    self.conv = ShortConv(cfg.conv, d, "heads", std=std, rngs=rngs, bias=True) if cfg.conv else None
    self.select = Linear((d, r + 2 * N), ("heads", None), std=std, rngs=rngs)
    # Not normal: uniform within r^-1/2.
    dt_kernel = jax.random.uniform(rngs.params(), (r, d), jnp.float32, -1.0, 1.0) * r**-0.5
    self.dt_kernel = param(dt_kernel, None, "heads")
    self.dt_bias = param(dt_bias(rngs, (d,)), "heads")
    A = jnp.tile(jnp.arange(1.0, N + 1)[None], (d, 1))
    self.A_log = param(jnp.log(A), "heads", None, decays=False)
    self.D = param(jnp.ones(d), "heads")
    self.out = Linear((d, width), ("heads", "embed"), std=std, rngs=rngs)

  def init_state(self, batch, max_length, dtype):
    S = jnp.zeros((batch, self.channels, self.cfg.state_size), accum_dtype(dtype))
    return dict(S=S) if self.conv is None else dict(S=S, conv=self.conv.init_state(batch, dtype))

  def recurrent_state(self):
    return self.channels * self.cfg.state_size

  def mix(self, x, segment_ids, state):
    wide, N = accum_dtype(x.dtype), self.cfg.state_size
    u, z = jnp.split(self.into(x), 2, axis=-1)
    new = {}
    if self.conv is not None:
      u, new["conv"] = self.conv(u, None if state is None else state["conv"], segment_ids)
    u = jax.nn.silu(u)
    dt, B, C = jnp.split(self.select(u), np.cumsum([self.rank, N]), axis=-1)
    dt = (dt @ self.dt_kernel[...].astype(dt.dtype)).astype(wide)
    dt = jax.nn.softplus(dt + self.dt_bias[...].astype(wide)[None, None])
    A = -jnp.exp(self.A_log[...].astype(wide))

    y, new["S"] = selective_scan(
      u,
      dt,
      A,
      B,
      C,
      D=self.D[...],
      S0=None if state is None else state["S"],
      segment_ids=segment_ids,
      chunk=self.cfg.chunk,
      implementation="recurrent" if x.shape[1] == 1 else None,
    )
    return self.out(y.astype(x.dtype) * jax.nn.silu(z)), None if state is None else new

  def flops(self, length):
    # Per state: two for its decay, one for its input, two each to go on and to be read.
    return self.channels * (7 * self.cfg.state_size + 3)
