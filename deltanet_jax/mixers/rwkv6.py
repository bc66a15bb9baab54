"""RWKV-6 (Finch): a decay per key channel, a bonus for the current token, shifts by the data."""

from typing import ClassVar

import jax
import jax.numpy as jnp

from deltanet_jax.config import MixerConfig, check, check_positive, settings
from deltanet_jax.mixers.base import ONLY_LAYER, Layer
from deltanet_jax.mixers.layers import Linear, merge_heads, param, split_heads
from deltanet_jax.mixers.matrix_state import LinearAttentionMixer
from deltanet_jax.mixers.norms import HeadLayerNorm
from deltanet_jax.mixers.rwkv import falling, lerp, rising, share_before, spread, zigzag
from deltanet_jax.ops import token_shift
from deltanet_jax.ops.checks import check_chunk
from deltanet_jax.ops.dtypes import accum_dtype


@settings
class RWKV6Config(MixerConfig):
  kind: ClassVar[str] = "rwkv6"

  head_size: int = 64
  shift_rank: int = 32  # of what the data add to each share of the token before
  decay_rank: int = 64
  chunk: int = 64

  def validate(self):
    check_positive(self, "head_size", "shift_rank", "decay_rank")
    check_chunk(self.chunk)


class RWKV6(LinearAttentionMixer):
  """S_t = Diag(e^{w_t}) S_{t-1} + k_t^T v_t, o_t = r_t (S_{t-1} + (u * k_t)^T v_t).

  The bonus u is on the keys, as in RWKV-6 itself; the paper's table has it (d) on the values.
  """

  Config = RWKV6Config
  recurrence = "S_t = S_{t-1} Diag(α_t) + v_t k_tᵀ"
  readout = "o_t = (S_{t-1} + v_t (d ⊙ k_t)ᵀ) q_t"
  efficient_form = "chunkwise, two levels"
  by_layer = True

  def __init__(
    self,
    cfg: RWKV6Config,
    width: int,
    *,
    layer: Layer = ONLY_LAYER,
    eps: float = 1e-6,
    std: float = 0.02,
    rngs,
  ):
    del eps  # the norm inside has its own
    check(
      width % cfg.head_size == 0,
      f"head_size is {cfg.head_size}, expected a divisor of the width {width}.",
    )
    self.cfg = cfg
    self.heads = width // cfg.head_size
    self.key_size = self.value_size = cfg.head_size
    rise, fall = rising(layer), falling(layer)
    early, late = share_before(width, fall), share_before(width, 0.5 * fall)
    # Of w, k, v, r and g in this order, and of what their own shares are made from.
    shares = [early, early, share_before(width, fall, 0.3 * rise), late, late]
    self.shares = param(jnp.stack(shares), None, "embed", decays=False)
    self.share = param(early, "embed")
    uniform = lambda shape: 0.01 * jax.random.uniform(rngs.params(), shape, minval=-1.0)
    low_rank = lambda value, *axes: param(value, *axes, decays=False)
    r = cfg.shift_rank
    self.shift_down = low_rank(jnp.zeros((width, 5 * r)), "embed", None)
    self.shift_up = low_rank(uniform((5, r, width)), None, None, "embed")
    self.decay_down = low_rank(jnp.zeros((width, cfg.decay_rank)), "embed", None)
    self.decay_up = low_rank(uniform((cfg.decay_rank, width)), None, "heads")
    power = 0.7 + 1.3 * rise
    self.decay = param(spread(width, -6.0, -1.0, power), "heads")
    self.bonus = param(rise * (1 - spread(width, 0.0, 1.0, 1)) + 0.1 * zigzag(width), "heads")
    make = lambda std: Linear((width, width), ("embed", "heads"), std=std, rngs=rngs)
    # As large as an orthogonal matrix times 0.1.
    small = 0.1 * width**-0.5
    self.r, self.k, self.v, self.g = make(std), make(small), make(std), make(small)
    scale = ((1 + jnp.asarray(layer.index, jnp.float32)) / layer.depth) ** 0.7
    self.norm = HeadLayerNorm(self.heads, cfg.head_size, eps=64e-5, bias=True, scale=scale)
    self.out = Linear((width, width), ("heads", "embed"), std=0.0, rngs=rngs)

  def init_state(self, batch, max_length, dtype):
    H, d = self.heads, self.key_size
    shift = jnp.zeros((batch, H * d), dtype)
    return dict(S=jnp.zeros((batch, H, d, d), accum_dtype(dtype)), shift=shift)

  def mix(self, x, segment_ids, state):
    before = None if state is None else state["shift"]
    before, last = token_shift(x, state=before, segment_ids=segment_ids)
    x_w, x_k, x_v, x_r, x_g = self.shifted(x, before)
    r, k, v = (split_heads(y, self.heads) for y in (self.r(x_r), self.k(x_k), self.v(x_v)))
    w = split_heads(self.log_decay(x_w), self.heads)
    # A token reads what is there before it writes: the operator, which writes first, is given
    # keys, values and decays of the token before.
    earlier = (token_shift(merge_heads(y), segment_ids=segment_ids)[0] for y in (k, v, w))
    earlier = (split_heads(y, self.heads) for y in earlier)
    o, S = self.run(r, *earlier, segment_ids, state, scale=1.0)
    u = split_heads(self.bonus[...].astype(w.dtype)[None, None], self.heads)
    own = (r.astype(w.dtype) * u * k.astype(w.dtype)).sum(axis=-1, keepdims=True)
    o = o + own.astype(x.dtype) * v
    y = self.out(self.norm(o) * jax.nn.silu(self.g(x_g)))
    if state is None:
      return y, None
    k_t, v_t, w_t = (z[:, -1].astype(S.dtype) for z in (k, v, w))
    S = jnp.exp(w_t)[..., None] * S + k_t[..., None] * v_t[..., None, :]
    return y, dict(S=S, shift=last)

  def shifted(self, x, before):
    """x mixed with the token before, once for each use, by shares that depend on both."""
    mixed = jnp.tanh(lerp(x, before, self.share) @ self.shift_down[...].astype(x.dtype))
    for share, part, up in zip(
      self.shares[...].astype(x.dtype),
      jnp.split(mixed, 5, axis=-1),
      self.shift_up[...].astype(x.dtype),
    ):
      yield lerp(x, before, share[None, None] + part @ up)

  def log_decay(self, x):
    """-exp of a bias per channel and what the data add to it."""
    wide = accum_dtype(x.dtype)
    down, up = (weight[...].astype(x.dtype) for weight in (self.decay_down, self.decay_up))
    log = (jnp.tanh(x @ down) @ up).astype(wide) + self.decay[...].astype(wide)[None, None]
    # From e^-22026, which is 0, to less there is no way, and e^log would overflow.
    return -jnp.exp(jnp.minimum(log, 10.0))
