"""`jax.vmap` folded into the batch dimension, for functions that process a batch sequentially."""

import functools

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from pallas_kernels.common.autodiff import reverse_only


def vmap_as_batch(f, no_forward_mode: str):
  """Wrap f so that `jax.vmap` adds to its batch dimension instead of adding an axis.

  Under `jax.vmap` f is called once, with the vmapped axis folded into the batch. A boolean flag is
  reduced with `any`; a `lax.cond` on it then still runs one branch, and what f processes at a time
  stays as small as without vmap.

  Args:
    f: Function of pytrees of arrays whose first axis is the batch (or groups of it), or of scalar
      flags that hold for the full batch. Reverse mode is that of f itself.
    no_forward_mode: Message of the TypeError that forward-mode autodiff raises.
  """

  @custom_vmap
  def batched(*args):
    return f(*args)

  @batched.def_vmap
  def _(size, in_batched, *args):
    # Every array of the results has a batch axis, so all are batched, whatever the arguments are.
    spread = lambda x, is_batched: x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
    folded = jax.tree.map(_fold, jax.tree.map(spread, args, tuple(in_batched)))
    results = jax.tree.map(functools.partial(_unfold, size), batched(*folded))
    return results, jax.tree.map(lambda _: True, results)

  @jax.custom_vjp
  def differentiable(*args):
    return batched(*args)

  def backward(args, cotangents):
    _, pull = jax.vjp(f, *args)
    return pull(cotangents)

  differentiable.defvjp(lambda *args: (batched(*args), args), backward)
  return lambda *args: differentiable(*reverse_only(args, no_forward_mode))


def _fold(x):
  return x.any() if x.ndim == 1 else x.reshape(-1, *x.shape[2:])


def _unfold(size, x):
  return jnp.broadcast_to(x, (size,)) if x.ndim == 0 else x.reshape(size, -1, *x.shape[1:])
