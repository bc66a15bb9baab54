"""Functions computed by kernels: reverse mode to any order, and `jax.vmap` as more rows.

JAX can differentiate no kernel, and gives one under `vmap` another axis of its grid. Here the first
derivative is a kernel too, second ones are those of a plain form, and members of a `vmap` are rows.
Not by `jax.custom_jvp`, which a scan that is differentiated forgets: the next order would meet the
kernel itself.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from pallas_kernels.common.autodiff import bind_linear

_by_kernel = Primitive("by_kernel")
_by_kernel.multiple_results = True


class Kernels(NamedTuple):
  """A function of args (arrays, or None) and its derivative, by kernels."""

  run: Callable  # (*args) -> outs
  save: Callable  # (*args) -> (outs, residuals): what the backward needs beside args
  backward: Callable  # (args, residuals, d_outs) -> a gradient for each of args, None for integers
  plain: Callable  # (*args) -> outs, which JAX differentiates
  unsupported_reason: str  # what forward mode meets
  out_rows: int = 0  # axis of outs that counts rows, as axis 0 of args does
  residual_rows: int = 0  # the same of residuals


def by_kernels(kernels: Kernels, *args):
  """kernels.run(*args), with derivatives."""
  return _run(kernels)(*args)


class _Call(NamedTuple):
  """f of trees of arrays as one operation, and all that JAX asks of it."""

  f: Callable
  jvp: Callable  # (args, moving tangents by their leaf) -> outs and the tangents of its leaves
  in_rows: tuple[int, ...] | int  # axis that counts rows, of each argument or of all
  out_rows: tuple[int, ...] | int  # the same of results

  def __call__(self, *args):
    leaves, tree = jax.tree.flatten(args)
    jaxpr, shapes = jax.make_jaxpr(self.f, return_shape=True)(*args)
    outs = _by_kernel.bind(*leaves, jaxpr=jaxpr, call=self, tree=tree)
    return jax.tree.unflatten(jax.tree.structure(shapes), outs)


def _run(kernels):
  def jvp(args, moving):
    outs, residuals = _save(kernels)(*args)
    return outs, _derivative(kernels, args, residuals, moving, outs)

  return _Call(kernels.run, jvp, 0, kernels.out_rows)


def _save(kernels):
  def jvp(args, moving):
    outs, residuals = _save(kernels)(*args)
    # Only the backward reads residuals, and its derivative is taken through args.
    still = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in jax.tree.leaves(residuals)]
    return (outs, residuals), _derivative(kernels, args, residuals, moving, outs) + still

  return _Call(kernels.save, jvp, 0, (kernels.out_rows, kernels.residual_rows))


def _backward(kernels):
  def jvp(given, moving):
    args, residuals, d_outs = given
    grads = _backward(kernels)(*given)
    count, skipped = len(jax.tree.leaves(args)), len(jax.tree.leaves(residuals))
    leaves, tree = jax.tree.flatten((args, d_outs))
    shift = lambda i: i if i < count else i - skipped
    moving = {shift(i): t for i, t in moving.items() if not count <= i < count + skipped}

    def transpose(constants, cotangents):
      def of_moving(moved):
        at = dict(zip(moving, moved))
        now = tree.unflatten([at.get(i, x) for i, x in enumerate(constants)])
        return _plain_gradients(kernels.plain, *now)

      _, pull = jax.vjp(of_moving, [constants[i] for i in moving])
      return pull(list(cotangents))[0]

    return grads, _linear(kernels, transpose, leaves, moving, grads)

  return _Call(kernels.backward, jvp, (0, kernels.residual_rows, kernels.out_rows), 0)


def _derivative(kernels, args, residuals, moving, outs):
  """Linear in the moving tangents of args, by its transpose alone."""
  leaves, tree = jax.tree.flatten((args, residuals))
  out_tree = jax.tree.structure(outs)

  def transpose(constants, cotangents):
    grads = _backward(kernels)(*tree.unflatten(constants), out_tree.unflatten(cotangents))
    at = dict(zip(_floating(args), jax.tree.leaves(grads), strict=True))
    return [at[i] for i in moving]

  return _linear(kernels, transpose, leaves, moving, outs)


def _linear(kernels, transpose, constants, moving, outs):
  def run(*_):
    raise TypeError(kernels.unsupported_reason)

  leaves = jax.tree.leaves(outs)
  return bind_linear(run, transpose, constants, list(moving.values()), leaves)


def _floating(tree):
  leaves = jax.tree.leaves(tree)
  return [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]


def _plain_gradients(plain, args, d_outs):
  """The gradients of all floating arguments, as leaves."""
  leaves, tree = jax.tree.flatten(args)
  floating = _floating(args)

  def of_floating(values):
    at = dict(zip(floating, values))
    return plain(*tree.unflatten([at.get(i, x) for i, x in enumerate(leaves)]))

  _, pull = jax.vjp(of_floating, [leaves[i] for i in floating])
  return pull(d_outs)[0]


@_by_kernel.def_impl
def _impl(*leaves, call, tree, **_):
  return jax.tree.leaves(call.f(*tree.unflatten(leaves)))


@_by_kernel.def_abstract_eval
def _abstract(*_, jaxpr, **__):
  return jaxpr.out_avals


def _jvp(primals, tangents, *, call, tree, **_):
  moving = {i: t for i, t in enumerate(tangents) if type(t) is not ad.Zero}
  outs, moved = call.jvp(tree.unflatten(primals), moving)
  return jax.tree.leaves(outs), moved


def _batch(leaves, axes, *, call, tree, **_):
  size = next(x.shape[a] for x, a in zip(leaves, axes) if a is not None)

  def fold(rows, x, axis):
    x = jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
    x = jnp.moveaxis(x, 0, rows)
    return x.reshape(*x.shape[:rows], size * x.shape[rows + 1], *x.shape[rows + 2 :])

  def unfold(rows, x):
    each = x.shape[rows] // size
    x = x.reshape(*x.shape[:rows], size, each, *x.shape[rows + 1 :])
    return jnp.moveaxis(x, rows, 0)

  rows = _of_leaves(call.in_rows, tree.unflatten(range(len(leaves))))
  outs = call(*tree.unflatten([fold(*x) for x in zip(rows, leaves, axes)]))
  rows = _of_leaves(call.out_rows, outs)
  return [unfold(*x) for x in zip(rows, jax.tree.leaves(outs))], [0] * len(rows)


def _of_leaves(numbers, trees):
  """The number of its tree, or the only one, for each leaf."""
  numbers = numbers if isinstance(numbers, tuple) else (numbers,) * len(trees)
  return [n for n, tree in zip(numbers, trees, strict=True) for _ in jax.tree.leaves(tree)]


def _lowered(*leaves, jaxpr, **_):
  return jaxpr_as_fun(jaxpr)(*leaves)


ad.primitive_jvps[_by_kernel] = _jvp
batching.primitive_batchers[_by_kernel] = _batch
mlir.register_lowering(_by_kernel, mlir.lower_fun(_lowered, multiple_results=True))
