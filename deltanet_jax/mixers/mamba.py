"""Mamba: a selective diagonal state space model per channel (S6)."""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from deltanet_jax.config import MixerConfig, check_positive, setting, settings
from deltanet_jax.mixers.base import Mixer, check_conv
from deltanet_jax.mixers.layers import Linear, ShortConv, dt_bias, param
from deltanet_jax.ops import selective_scan
from deltanet_jax.ops.checks import check_chunk
from deltanet_jax.ops.dtypes import accum_dtype


@settings
class MambaConfig(MixerConfig):
  kind: ClassVar[str] = "mamba"

  expand: int = setting(2, "Number of channels over the model width.")
  state_size: int = setting(16, "State size per channel.")
  dt_rank: int | None = setting(
    None, "Rank of the projection to the step size dt; None: width / 16, rounded up."
  )
  conv: int = setting(4, "Kernel width of the short convolution; 0: none.")
  chunk: int = setting(64, "Chunk size of the associative scan in tokens.")

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
    del eps  # no norm in this mixer
    self.cfg = cfg
    self.channels = d = cfg.expand * width
    self.rank = r = cfg.dt_rank or math.ceil(width / 16)
    N = cfg.state_size
    self.into = Linear((width, 2 * d), ("embed", "heads"), std=std, rngs=rngs)
    self.conv = ShortConv(cfg.conv, d, "heads", std=std, rngs=rngs, bias=True) if cfg.conv else None
    self.select = Linear((d, r + 2 * N), ("heads", None), std=std, rngs=rngs)
    # Uniform in (-r^-1/2, r^-1/2).
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
    accum, N = accum_dtype(x.dtype), self.cfg.state_size
    u, z = jnp.split(self.into(x), 2, axis=-1)
    new = {}
    if self.conv is not None:
      u, new["conv"] = self.conv(u, None if state is None else state["conv"], segment_ids)
    u = jax.nn.silu(u)
    dt, B, C = jnp.split(self.select(u), np.cumsum([self.rank, N]), axis=-1)
    dt = (dt @ self.dt_kernel[...].astype(dt.dtype)).astype(accum)
    dt = jax.nn.softplus(dt + self.dt_bias[...].astype(accum)[None, None])
    A = -jnp.exp(self.A_log[...].astype(accum))

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
    # Per state element: 2 for the decay, 1 for the input, 2 for the update and 2 for the readout.
    return self.channels * (7 * self.cfg.state_size + 3)
