"""Functions whose backward is written by hand: with forward mode, or refusing it in a sentence.

`jax.custom_vjp` has no forward mode, and says so without a way on. It also (jax 0.10.2) mixes up
residuals that are arguments where a function inside a scan is differentiated twice and some
argument, for instance the segments of a row, is not differentiated at all: the indices of these
residuals are not moved past the constants that it finds. Here a function is a `jax.custom_jvp`, and
its derivative a linear map that carries its own transpose.
"""

import functools

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

# run(constants, tangents) is linear in the tangents, transpose(constants, cotangents) its
# transpose; all of them flat. The first `count` operands are the constants.
_linear = Primitive("linear_by_hand")
_linear.multiple_results = True


def custom_backward(backward, static=(), inline=False):
  """Decorates f(*args), whose gradient is then backward(*static_args, args, d_out).

  Forward mode is JAX's own, of f as it is written.

  Args:
    backward: returns one gradient for each of args (those that are not static), None for integers
      and for what is None itself.
    static: positions of arguments that are hashable and no arrays.
    inline: leaves f's operations visible where it is differentiated, to policies of what is kept
      for the backward; a second derivative is then JAX's own.
  """

  def decorate(f):
    wrapped = jax.custom_jvp(f, nondiff_argnums=static)

    def rule(*static_args_and_pair):
      *static_args, args, tangents = static_args_and_pair
      whole = functools.partial(_merged, static, static_args)
      leaves, tree = jax.tree.flatten(args)
      moving = moving_leaves(tangents)
      out = (f if inline else wrapped)(*whole(args))
      out_leaves, out_tree = jax.tree.flatten(out)

      def run(constants, tangents):
        def of_moving(*moved):
          at = dict(zip(moving, moved))
          return jax.tree.leaves(
            f(*whole(tree.unflatten([at.get(i, x) for i, x in enumerate(constants)])))
          )

        return jax.jvp(of_moving, [constants[i] for i in moving], list(tangents))[1]

      def transpose(constants, cotangents):
        d = out_tree.unflatten(cotangents)
        grads = jax.tree.leaves(backward(*static_args, tree.unflatten(constants), d))
        floating = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]
        at = dict(zip(floating, grads, strict=True))
        return [at[i] for i in moving]

      flat = jax.tree.leaves(tangents)
      moved = bind_linear(run, transpose, leaves, [flat[i] for i in moving], out_leaves)
      return out, out_tree.unflatten(moved)

    wrapped.defjvp(rule, symbolic_zeros=True)
    return functools.wraps(f)(wrapped)

  return decorate


def reverse_only(args, message: str):
  """Return args (a pytree of arrays or None); forward-mode autodiff raises TypeError(message)."""

  @jax.custom_jvp
  def same(args):
    return args

  def rule(primals, tangents):
    leaves, tree = jax.tree.flatten(primals[0])
    flat, moving = jax.tree.leaves(tangents[0]), moving_leaves(tangents[0])

    def run(*_):
      raise TypeError(message)

    transpose = lambda _, cotangents: list(cotangents)
    moved = bind_linear(run, transpose, [], [flat[i] for i in moving], [leaves[i] for i in moving])
    at = dict(zip(moving, moved))
    return primals[0], tree.unflatten([at.get(i, flat[i]) for i in range(len(leaves))])

  same.defjvp(rule, symbolic_zeros=True)
  return same(args)


def _merged(static, static_args, args):
  """All arguments in their order."""
  args = list(args)
  for position, x in sorted(zip(static, static_args)):
    args.insert(position, x)
  return args


def moving_leaves(tangents):
  """Which leaves have a tangent that is not known to be zero."""
  return [
    i
    for i, t in enumerate(jax.tree.leaves(tangents))
    if not isinstance(t, SymbolicZero) and t.dtype != jax.dtypes.float0
  ]


def bind_linear(run, transpose, constants, tangents, outs):
  shapes = tuple(jax.typeof(x).strip_weak_type() for x in outs)
  return _linear.bind(
    *constants, *tangents, run=run, transpose=transpose, count=len(constants), shapes=shapes
  )


@_linear.def_impl
def _run(*operands, run, count, **_):
  return run(operands[:count], operands[count:])


@_linear.def_abstract_eval
def _abstract(*_, shapes, **__):
  return list(shapes)


def _jvp(primals, tangents, **params):
  moving = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]

  def of_moving(*moved):
    at = dict(zip(moving, moved))
    return _run(*(at.get(i, x) for i, x in enumerate(primals)), **params)

  return jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])


def _transpose(cotangents, *operands, transpose, count, **_):
  grads = transpose(operands[:count], [ad.instantiate_zeros(d) for d in cotangents])
  wanted = [ad.is_undefined_primal(x) for x in operands[count:]]
  return [None] * count + [d if w else None for d, w in zip(grads, wanted, strict=True)]


def _batch(operands, axes, *, run, transpose, count, shapes):
  size = next(x.shape[a] for x, a in zip(operands, axes) if a is not None)
  of_constants, of_tangents = tuple(axes[:count]), tuple(axes[count:])

  def transpose_all(constants, cotangents):
    one = lambda constants, cotangents: tuple(transpose(constants, cotangents))
    grads = jax.vmap(one, in_axes=(of_constants, 0))(tuple(constants), list(cotangents))
    return [
      d.sum(axis=0) if a is None else jnp.moveaxis(d, 0, a) for d, a in zip(grads, of_tangents)
    ]

  def run_all(constants, tangents):
    return jax.vmap(run, in_axes=(of_constants, of_tangents), axis_size=size)(
      tuple(constants), tuple(tangents)
    )

  shapes = tuple(_with_leading(x, size) for x in shapes)
  outs = _linear.bind(*operands, run=run_all, transpose=transpose_all, count=count, shapes=shapes)
  return outs, [0] * len(outs)


def _with_leading(aval, size):
  sharding = aval.sharding.update(spec=(None, *aval.sharding.spec))
  return aval.update(shape=(size, *aval.shape), sharding=sharding)


ad.primitive_jvps[_linear] = _jvp
ad.primitive_transposes[_linear] = _transpose
batching.primitive_batchers[_linear] = _batch
mlir.register_lowering(_linear, mlir.lower_fun(_run, multiple_results=True))
