"""Kernels as differentiable JAX operations: reverse mode of any order, `vmap` as a larger batch.

JAX cannot differentiate a Pallas kernel, and `vmap` of one adds a grid axis. Here the first
derivative is a backward kernel, higher derivatives are those of a reference implementation in plain
JAX, and `vmap` folds into the batch dimension. Forward mode raises TypeError.

Why not `jax.custom_jvp`: differentiating a scan drops its rule, so that the second derivative would
try to differentiate the kernel itself.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from pallas_kernels.common.autodiff import apply_linear_map

_kernel_call = Primitive("kernel_call")
_kernel_call.multiple_results = True


class KernelVJP(NamedTuple):
  """A function of args (arrays or None) computed by kernels, and its backward pass."""

  forward: Callable  # (*args) -> outs
  forward_saving: Callable  # (*args) -> (outs, residuals for the backward pass besides args)
  backward: Callable  # (args, residuals, d_outs) -> one gradient per arg, None for integers
  reference: Callable  # (*args) -> outs in plain JAX, for second derivatives
  name: str  # for the TypeError that forward mode raises
  out_batch_axis: int = 0  # batch axis of outs; that of args is 0
  residual_batch_axis: int = 0


def call_kernel(kernel: KernelVJP, *args):
  """Return kernel.forward(*args), differentiable and batchable."""
  return _forward(kernel)(*args)


class _KernelCall(NamedTuple):
  """A function of pytrees bound as one primitive, with its JVP and its batch axes."""

  f: Callable
  jvp: Callable  # (args, leaf index -> nonzero tangent) -> outs and the tangents of its leaves
  in_batch_axes: tuple[int, ...] | int  # of each argument, or of all of them
  out_batch_axes: tuple[int, ...] | int  # of each output, or of all of them

  def __call__(self, *args):
    leaves, tree = jax.tree.flatten(args)
    jaxpr, shapes = jax.make_jaxpr(self.f, return_shape=True)(*args)
    outs = _kernel_call.bind(*leaves, jaxpr=jaxpr, call=self, tree=tree)
    return jax.tree.unflatten(jax.tree.structure(shapes), outs)


def _forward(kernel):
  def jvp(args, tangents):
    outs, residuals = _forward_saving(kernel)(*args)
    return outs, _derivative(kernel, args, residuals, tangents, outs)

  return _KernelCall(kernel.forward, jvp, 0, kernel.out_batch_axis)


def _forward_saving(kernel):
  def jvp(args, tangents):
    outs, residuals = _forward_saving(kernel)(*args)
    # Only the backward pass reads residuals, and its derivative is taken through args.
    zeros = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in jax.tree.leaves(residuals)]
    return (outs, residuals), _derivative(kernel, args, residuals, tangents, outs) + zeros

  out_axes = (kernel.out_batch_axis, kernel.residual_batch_axis)
  return _KernelCall(kernel.forward_saving, jvp, 0, out_axes)


def _backward(kernel):
  def jvp(inputs, tangents):
    args, residuals, d_outs = inputs
    grads = _backward(kernel)(*inputs)
    count, skipped = len(jax.tree.leaves(args)), len(jax.tree.leaves(residuals))
    leaves, tree = jax.tree.flatten((args, d_outs))
    shift = lambda i: i if i < count else i - skipped
    tangents = {shift(i): t for i, t in tangents.items() if not count <= i < count + skipped}

    def transpose(constants, cotangents):
      def reference_grads(values):
        new = dict(zip(tangents, values))
        inputs = tree.unflatten([new.get(i, x) for i, x in enumerate(constants)])
        return _reference_gradients(kernel.reference, *inputs)

      _, vjp = jax.vjp(reference_grads, [constants[i] for i in tangents])
      return vjp(list(cotangents))[0]

    return grads, _apply_transposable(kernel, transpose, leaves, tangents, grads)

  in_axes = (0, kernel.residual_batch_axis, kernel.out_batch_axis)
  return _KernelCall(kernel.backward, jvp, in_axes, 0)


def _derivative(kernel, args, residuals, tangents, outs):
  """Return the JVP of the forward pass, defined only by its transpose, the backward kernel."""
  leaves, tree = jax.tree.flatten((args, residuals))
  out_tree = jax.tree.structure(outs)

  def transpose(constants, cotangents):
    grads = _backward(kernel)(*tree.unflatten(constants), out_tree.unflatten(cotangents))
    by_leaf = dict(zip(_floating(args), jax.tree.leaves(grads), strict=True))
    return [by_leaf[i] for i in tangents]

  return _apply_transposable(kernel, transpose, leaves, tangents, outs)


def _apply_transposable(kernel, transpose, constants, tangents, outs):
  def run(*_):
    raise TypeError(
      "forward-mode autodiff (jax.jvp, jax.linearize, jax.hessian) is not supported by the kernel"
      f" {kernel.name}: it has a custom VJP, which is reverse mode only. Use an implementation in"
      " plain JAX."
    )

  leaves = jax.tree.leaves(outs)
  return apply_linear_map(run, transpose, constants, list(tangents.values()), leaves)


def _floating(tree):
  leaves = jax.tree.leaves(tree)
  return [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]


def _reference_gradients(reference, args, d_outs):
  """Return the gradients of all floating-point leaves of args, as a list."""
  leaves, tree = jax.tree.flatten(args)
  floating = _floating(args)

  def of_floating(values):
    new = dict(zip(floating, values))
    return reference(*tree.unflatten([new.get(i, x) for i, x in enumerate(leaves)]))

  _, vjp = jax.vjp(of_floating, [leaves[i] for i in floating])
  return vjp(d_outs)[0]


@_kernel_call.def_impl
def _impl(*leaves, call, tree, **_):
  return jax.tree.leaves(call.f(*tree.unflatten(leaves)))


@_kernel_call.def_abstract_eval
def _abstract(*_, jaxpr, **__):
  return jaxpr.out_avals


def _jvp(primals, tangents, *, call, tree, **_):
  nonzero = {i: t for i, t in enumerate(tangents) if type(t) is not ad.Zero}
  outs, out_tangents = call.jvp(tree.unflatten(primals), nonzero)
  return jax.tree.leaves(outs), out_tangents


def _vmap_as_batch(leaves, axes, *, call, tree, **_):
  size = next(x.shape[a] for x, a in zip(leaves, axes) if a is not None)

  def fold(batch_axis, x, axis):
    x = jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
    x = jnp.moveaxis(x, 0, batch_axis)
    before, after = x.shape[:batch_axis], x.shape[batch_axis + 2 :]
    return x.reshape(*before, size * x.shape[batch_axis + 1], *after)

  def unfold(batch_axis, x):
    batch = x.shape[batch_axis] // size
    x = x.reshape(*x.shape[:batch_axis], size, batch, *x.shape[batch_axis + 1 :])
    return jnp.moveaxis(x, batch_axis, 0)

  batch_axes = _axis_per_leaf(call.in_batch_axes, tree.unflatten(range(len(leaves))))
  outs = call(*tree.unflatten([fold(*x) for x in zip(batch_axes, leaves, axes)]))
  batch_axes = _axis_per_leaf(call.out_batch_axes, outs)
  return [unfold(*x) for x in zip(batch_axes, jax.tree.leaves(outs))], [0] * len(batch_axes)


def _axis_per_leaf(axes, trees):
  """Repeat the axis of each tree (or the only axis) for each of its leaves."""
  axes = axes if isinstance(axes, tuple) else (axes,) * len(trees)
  return [axis for axis, tree in zip(axes, trees, strict=True) for _ in jax.tree.leaves(tree)]


def _lowered(*leaves, jaxpr, **_):
  return jaxpr_as_fun(jaxpr)(*leaves)


ad.primitive_jvps[_kernel_call] = _jvp
batching.primitive_batchers[_kernel_call] = _vmap_as_batch
mlir.register_lowering(_kernel_call, mlir.lower_fun(_lowered, multiple_results=True))
