"""DeltaProduct: several delta-rule steps per token, with a per-head (scalar) decay."""

from typing import ClassVar

import jax.numpy as jnp

from deltanet_jax.config import check_positive, setting, settings
from deltanet_jax.mixers.gated_deltanet import GatedDeltaNet, GatedDeltaNetConfig
from deltanet_jax.mixers.layers import split_heads


@settings
class DeltaProductConfig(GatedDeltaNetConfig):
  """Fields of Gated DeltaNet, but `chunk` counts delta-rule steps instead of tokens."""

  kind: ClassVar[str] = "deltaproduct"

  steps: int = setting(2, "Delta-rule steps (Householder factors) per token.")
  forget_gate: bool = setting(True, "Decay the state, as in Gated DeltaNet.")
  negative_eigenvalues: bool = setting(
    True, "beta in (0, 2) instead of (0, 1): transitions may have negative eigenvalues."
  )

  def validate(self):
    # Not super(): dataclass slots recreate the class, which breaks the zero-argument form.
    GatedDeltaNetConfig.validate(self)
    check_positive(self, "steps")


class DeltaProduct(GatedDeltaNet):
  """o_t = dk^-1/2 q_t S_t; S_t is e^{g_t} S_{t-1} after steps S += beta_j k_j^T (v_j - k_j S)."""

  Config = DeltaProductConfig
  recurrence = (
    "S_t = S_{t-1} (α_t ∏_j (I - β_{t,j} k_{t,j} k_{t,j}ᵀ))"
    " + Σ_j β_{t,j} v_{t,j} k_{t,j}ᵀ ∏_{i>j} (I - β_{t,i} k_{t,i} k_{t,i}ᵀ)"
  )
  readout = "o_t = S_t q_t"

  def __init__(
    self, cfg: DeltaProductConfig, width: int, *, eps: float = 1e-6, std: float = 0.02, rngs
  ):
    super().__init__(cfg, width, eps=eps, std=std, steps=cfg.steps, rngs=rngs)
    if not cfg.forget_gate:
      self.decay = self.A_log = self.dt_bias = None

  def flops(self, length):
    return self.cfg.steps * super().flops(self.cfg.steps * length)

  def mix(self, x, segment_ids, state):
    n, H, (B, L) = self.cfg.steps, self.heads, x.shape[:2]
    (q, k, v), beta, g, convs = self.projections(x, segment_ids, state)
    q, k, v = split_heads(q, H), split_heads(k, n * H), split_heads(v, n * H)

    def at(step, y):
      """Return y `[B L ..]` at one step of each token and zeros at the others, `[B L n ..]`."""
      zeros = [(0, 0), (0, 0), (step, n - 1 - step)] + [(0, 0)] * (y.ndim - 2)
      return jnp.pad(y[:, :, None], zeros)

    # The state decays before the first step and is read after the last.
    steps = at(n - 1, q), k, v, beta, None if g is None else at(0, g)
    q, k, v, beta, g = (
      None if y is None else y.reshape(B, L * n, H, *y.shape[size:])
      for y, size in zip(steps, (4, 3, 3, 3, 4))
    )
    if state is not None and L == 1:
      # Step by step, with the decoding kernel of the delta rule.
      new = state
      for j in range(n):
        step = (None if y is None else y[:, j : j + 1] for y in (q, k, v, beta, g))
        o, S = self.run(*step, None, new)
        new = dict(S=S)
    else:
      segments = None if segment_ids is None else jnp.repeat(segment_ids, n, axis=1)
      o, S = self.run(q, k, v, beta, g, segments, state)
      o = o[:, n - 1 :: n]
    return self.output(o, x), None if state is None else dict(S=S, **convs)
