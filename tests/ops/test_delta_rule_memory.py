"""Temporary memory of the gradient, from XLA's memory analysis of the compiled program."""

import jax
import jax.numpy as jnp

from deltanet_jax.ops import delta_rule

H, D = 16, 128


def temporary_bytes(L):
  def loss(q, k, v, beta):
    o, S = delta_rule(q, k, v, beta, implementation="chunkwise")
    return (o * o).sum() + (S * S).sum()

  array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
  arguments = [array(1, L, H, D)] * 3 + [array(1, L, H)]
  compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(*arguments).compile()
  return compiled.memory_analysis().temp_size_in_bytes


def test_gradient_memory_is_small_and_linear_in_length():
  short, long = temporary_bytes(8192), temporary_bytes(16384)
  qkvo = 4 * 8192 * H * D * 4
  assert short <= 3 * qkvo, f"{short / qkvo:.2f} times q, k, v and o"
  assert long <= 2.1 * short, f"{long / short:.2f} times for twice the length"
