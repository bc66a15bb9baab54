"""One case for each public operator: batched arrays, and arrays that all sequences share."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from deltanet_jax import ops
from deltanet_jax.ops.epilogue import Epilogue

B, L, H, D = 8, 20, 2, 16


@dataclasses.dataclass(frozen=True)
class Case:
  """f(**batched, **shared); `batched` are sharded over the batch, `shared` are replicated."""

  f: Callable
  batched: dict
  shared: dict = dataclasses.field(default_factory=dict)

  def loss(self, batched, shared):
    results = jax.tree.leaves(self.f(**batched, **shared))
    return sum(jnp.sum(jnp.sin(3 * jnp.real(x).astype(jnp.float32))) for x in results)

  def value_and_gradients(self, batched, shared, reduce=lambda loss: loss):
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
    split = lambda arrays, keep: {k: x for k, x in arrays.items() if is_float(x) == keep}
    fixed = split(batched, False) | split(shared, False)
    loss = lambda batched, shared: reduce(self.loss(batched | fixed, shared))
    gradient = jax.value_and_grad(loss, argnums=(0, 1))
    return gradient(split(batched, True), split(shared, True))


def _arrays():
  rng = np.random.default_rng(0)
  return lambda *shape: jnp.asarray(0.5 * rng.standard_normal(shape), jnp.float32)


def make_cases() -> dict[str, Case]:
  """Every operator in plain JAX, with packed sequences where it has them."""
  draw = _arrays()
  gate = lambda *shape: -jnp.abs(draw(*shape))
  complex_ = lambda *shape: jax.lax.complex(draw(*shape), draw(*shape))
  with_options = functools.partial
  ids = jnp.asarray(np.arange(L) // 7 + np.arange(B)[:, None], jnp.int32)
  heads = lambda: draw(B, L, H, D)
  qkv = dict(q=heads(), k=heads() / 4, v=heads())
  token = {f"{name}_t": x[:, 0] for name, x in qkv.items()}
  beta, S = jax.nn.sigmoid(draw(B, L, H)), draw(B, H, D, D)
  gated = dict(g=gate(B, L, H, D), S0=S, segment_ids=ids)
  scan = dict(u=draw(B, L, 6), dt=-gate(B, L, 6), B=draw(B, L, 4), C=draw(B, L, 4))
  space = dict(log_A=complex_(6, 4) - 2, B=complex_(6, 4), C=complex_(6, 4))
  cases = {
    "delta_rule_step": Case(ops.delta_rule_step, dict(**token, beta_t=beta[:, 0], S=S)),
    "delta_rule_attention": Case(ops.delta_rule_attention, dict(q=qkv["q"], k=qkv["k"], beta=beta)),
    "linear_attention_step": Case(ops.linear_attention_step, dict(**token, S=S)),
    "dplr_step": Case(ops.dplr_step, dict(**token, a_t=draw(B, H, D), b_t=draw(B, H, D), S=S)),
    "causal_attention": Case(ops.causal_attention, dict(**qkv, segment_ids=ids)),
    "causal_attention_window": Case(with_options(ops.causal_attention, window=5), qkv),
    "cached_attention": Case(_cached_attention, qkv),
    "long_conv_attention": Case(ops.long_conv_attention, qkv, dict(h=draw(10, H))),
    "short_conv": Case(
      with_options(ops.short_conv, epilogue=Epilogue("silu", "l2", 4)),
      dict(x=draw(B, L, 8), segment_ids=ids),
      dict(kernel=draw(4, 8)),
    ),
    "head_norm": Case(
      with_options(ops.head_norm, eps=1e-6, gate_activation=jax.nn.silu),
      dict(x=draw(B, L, 8), gate=draw(B, L, 8)),
      dict(scale=draw(4)),
    ),
    "rope": Case(ops.rope, dict(x=heads(), positions=jnp.tile(jnp.arange(L)[None], (B, 1)))),
    "logcumsumexp": Case(ops.logcumsumexp, dict(x=heads(), segment_ids=ids)),
    "rms_norm": Case(with_options(ops.rms_norm, eps=1e-6), dict(x=draw(B, 8)), dict(scale=draw(4))),
    "layer_norm": Case(
      with_options(ops.layer_norm, eps=1e-6), dict(x=draw(B, 8)), dict(scale=draw(8), bias=draw(8))
    ),
    "l2_norm": Case(with_options(ops.l2_norm, size=4), dict(x=draw(B, 8))),
    "l1_norm": Case(with_options(ops.l1_norm, size=4), dict(x=draw(B, 8))),
    "token_shift": Case(ops.token_shift, dict(x=draw(B, L, 8))),
    "unit_lower_inverse": Case(ops.unit_lower_inverse, dict(A=draw(B, 6, 6))),
  }
  for name in (None, "recurrent", "chunkwise", "parallel"):
    delta_rule = with_options(ops.delta_rule, implementation=name)
    cases[f"delta_rule_{name}"] = Case(delta_rule, dict(**qkv, beta=beta))
    cases[f"delta_rule_gated_{name}"] = Case(delta_rule, dict(**qkv, beta=beta, **gated))
  for name in ("recurrent", "chunkwise"):
    option = dict(implementation=name)
    rank_one = dict(a=heads() / 4, b=heads() / 4)
    cases[f"dplr_{name}"] = Case(with_options(ops.dplr, **option), qkv | rank_one | gated)
    cases[f"linear_attention_{name}"] = Case(with_options(ops.linear_attention, **option), qkv)
    cases[f"linear_attention_gated_{name}"] = Case(
      with_options(ops.linear_attention, **option), qkv | gated
    )
    cases[f"selective_scan_{name}"] = Case(
      with_options(ops.selective_scan, **option), scan, dict(A=gate(6, 4))
    )
    cases[f"log_max_scan_{name}"] = Case(
      with_options(ops.log_max_scan, **option),
      dict(k=draw(B, L, 6), v=draw(B, L, 6)),
      dict(w=gate(6), u=draw(6)),
    )
  for name in ("recurrent", "convolution"):
    run = with_options(ops.state_space, implementation=name)
    cases[f"state_space_{name}"] = Case(run, dict(u=draw(B, L, 6)), space)
  for name in ("direct", "fft"):
    run = with_options(ops.long_conv, implementation=name)
    cases[f"long_conv_{name}"] = Case(
      run, dict(u=draw(B, L, 6), segment_ids=ids), dict(h=draw(10, 3))
    )
  return cases


def make_kernel_cases() -> dict[str, Case]:
  """Every Pallas kernel with a gradient, in interpret mode."""
  draw = _arrays()
  length, size = 64, 128
  heads = lambda: draw(B, length, H, size)
  qkv = dict(q=heads(), k=heads() / 12, v=heads())
  half = {name: x.astype(jnp.bfloat16) for name, x in qkv.items()}
  beta = jax.nn.sigmoid(draw(B, length, H))
  gate = dict(g=-jnp.abs(draw(B, length, H)), segment_ids=jnp.zeros((B, length), jnp.int32))
  conv = dict(x=draw(B, length, size))
  positions = dict(positions=jnp.tile(jnp.arange(length)[None], (B, 1)))
  cases = {}
  for name in ("pallas_tpu", "pallas_gpu"):
    run = lambda f, name=name: functools.partial(f, implementation=name, interpret=True)
    cases[f"delta_rule_{name}"] = Case(run(ops.delta_rule), dict(**qkv, beta=beta))
    cases[f"delta_rule_gated_{name}"] = Case(run(ops.delta_rule), dict(**qkv, beta=beta, **gate))
    cases[f"linear_attention_{name}"] = Case(run(ops.linear_attention), qkv)
    cases[f"causal_attention_{name}"] = Case(run(ops.causal_attention), half)
    cases[f"short_conv_{name}"] = Case(run(ops.short_conv), conv, dict(kernel=draw(4, size)))
  rope = functools.partial(ops.rope, implementation="pallas_tpu", interpret=True)
  cases["rope_pallas_tpu"] = Case(rope, dict(x=heads(), **positions))
  options = dict(eps=1e-6, gate_activation=jax.nn.silu, implementation="pallas_gpu")
  head_norm = functools.partial(ops.head_norm, interpret=True, **options)
  cases["head_norm_pallas_gpu"] = Case(
    head_norm, dict(**conv, gate=draw(B, length, size)), dict(scale=draw(64))
  )
  return cases


def _cached_attention(q, k, v):
  cache = ops.init_cache(q.shape[0], 32, H, D, jnp.float32)
  return ops.cached_attention(q, k, v, cache)[0]
