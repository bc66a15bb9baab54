"""`jax.vmap` that folds its members into the rows, for functions that work through rows in turn."""

import functools

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from pallas_kernels.common.autodiff import reverse_only
from pallas_kernels.delta_rule.checks import NO_FORWARD_MODE


def vmap_as_batch(f):
  """f, of arrays whose first axis counts rows or groups of rows, or of a flag for all of them.

  Under `jax.vmap` it is called once with the rows of all members, and a flag is that of any member;
  a `lax.cond` on the flag then still runs one branch, and what f works on together stays small.
  Reverse mode is that of f itself; forward mode is refused.
  """

  @custom_vmap
  def batched(*args):
    return f(*args)

  @batched.def_vmap
  def _(size, in_batched, *args):
    # Every array of the results counts rows, so all of them are batched, whatever the arguments.
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
  return lambda *args: differentiable(*reverse_only(args, NO_FORWARD_MODE))


def _fold(x):
  return x.any() if x.ndim == 1 else x.reshape(-1, *x.shape[2:])


def _unfold(size, x):
  return jnp.broadcast_to(x, (size,)) if x.ndim == 0 else x.reshape(size, -1, *x.shape[1:])
