"""S4D: a time-invariant diagonal state space model per channel."""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from deltanet_jax.config import MixerConfig, check, check_positive, setting, settings
from deltanet_jax.mixers.base import Mixer
from deltanet_jax.mixers.layers import Linear, normal, param
from deltanet_jax.ops import state_space
from deltanet_jax.ops.dtypes import accum_dtype
from deltanet_jax.ops.long_conv.fft import conv_flops
from deltanet_jax.sharding import locally


@settings
class S4DConfig(MixerConfig):
  kind: ClassVar[str] = "s4d"

  state_size: int = setting(
    64, "Real numbers of state per channel, twice the number of complex states; even."
  )

  def validate(self):
    check_positive(self, "state_size")
    check(self.state_size % 2 == 0, f"state_size is {self.state_size}, expected an even number.")


class S4D(Mixer):
  """x_t = e^{dt A} x_{t-1} + (e^{dt A} - 1)/A u_t, y_t = 2 Re(C x_t) + D u_t; GELU, linear, GLU."""

  Config = S4DConfig
  recurrence = "S_t = S_{t-1} ⊙ exp(-(α 1ᵀ) ⊙ exp(A)) + B ⊙ (v_t 1ᵀ)"
  readout = "o_t = (S_t ⊙ C) 1 + d ⊙ v_t"
  operator = "state_space"
  efficient_form = "long convolution by FFT"

  def __init__(self, cfg: S4DConfig, width: int, *, eps: float = 1e-6, std: float = 0.02, rngs):
    del eps  # no norm in this mixer
    self.cfg, self.channels = cfg, width
    n = cfg.state_size // 2
    u = jax.random.uniform(rngs.params(), (width,), jnp.float32)
    log_dt = u * (math.log(0.1) - math.log(1e-3)) + math.log(1e-3)
    self.log_dt = param(log_dt, "heads")
    # A = -1/2 + i pi n (S4D-Lin).
    axes = ("heads", None)
    self.A_log = param(jnp.full((width, n), math.log(0.5)), *axes, decays=False)
    frequencies = jnp.tile(math.pi * jnp.arange(n, dtype=jnp.float32)[None], (width, 1))
    self.A_imag = param(frequencies, *axes, decays=False)
    self.C = param(normal(rngs, (width, n, 2), 0.5**0.5), *axes, None)  # real and imaginary parts
    self.D = param(normal(rngs, (width,), 1.0), "heads")
    self.out = Linear((width, 2 * width), ("heads", "embed"), std=std, rngs=rngs, bias=True)

  def init_state(self, batch, max_length, dtype):
    shape = (batch, self.channels, self.cfg.state_size // 2, 2)
    return dict(S=jnp.zeros(shape, accum_dtype(dtype)))

  def recurrent_state(self):
    return self.channels * self.cfg.state_size

  def mix(self, x, segment_ids, state):
    accum = accum_dtype(x.dtype)
    A_log, A_imag, C, log_dt, D = (
      w[...].astype(accum) for w in (self.A_log, self.A_imag, self.C, self.log_dt, self.D)
    )
    A = lax.complex(-jnp.exp(A_log), A_imag)
    log_A = A * jnp.exp(log_dt).astype(A.dtype)[:, None]
    B = jnp.expm1(log_A) / A
    form = "recurrent" if x.shape[1] == 1 else None

    def run(u, log_A, B, C, S0, segment_ids):
      return state_space(u, log_A, B, C, S0=S0, segment_ids=segment_ids, implementation=form)

    S0 = None if state is None else lax.complex(state["S"][..., 0], state["S"][..., 1])
    tokens, weights = ("batch", None, "mixing_heads"), ("mixing_heads", None)
    last = ("batch", "mixing_heads", None)
    names = (tokens, weights, weights, weights, last, ("batch", None))
    C = lax.complex(C[..., 0], C[..., 1])
    y, S = locally(run, (x, log_A, B, C, S0, segment_ids), names, (tokens, last))
    y = y.astype(accum) + D[None, None] * x.astype(accum)
    y, gate = jnp.split(self.out(jax.nn.gelu(y, approximate=False).astype(x.dtype)), 2, axis=-1)
    state = None if state is None else dict(S=jnp.stack([S.real, S.imag], axis=-1))
    return y * jax.nn.sigmoid(gate), state

  def flops(self, length):
    # 8 per complex state for the convolution kernel, and the convolution with it.
    return self.channels * (4 * self.cfg.state_size + conv_flops(length))
