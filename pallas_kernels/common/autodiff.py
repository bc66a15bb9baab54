"""Custom backward passes that keep forward-mode autodiff, or reject it with a clear message.

Why not `jax.custom_vjp`: it has no forward mode, and its error message offers no alternative. In
jax 0.10.2 it also mixes up residuals that are arguments when a function inside a scan is
differentiated twice and some argument (e.g. `segment_ids`) is not differentiated: it does not shift
the indices of these residuals past the constants it finds. Here a function is a `jax.custom_jvp`
whose derivative is a linear map with an explicit transpose.
"""

import functools

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

# run(constants, tangents) is linear in the tangents and transpose(constants, cotangents) is its
# transpose; both take flat lists. The first `count` operands are the constants.
_linear_map = Primitive("linear_map_with_transpose")
_linear_map.multiple_results = True


def custom_backward(backward, static=(), inline=False):
  """Decorate f(*args) with a custom backward pass, backward(*static_args, args, d_out).

  Forward mode differentiates f itself.

  Args:
    backward: returns one gradient per non-static argument, None for integer and None arguments.
    static: positions of the hashable non-array arguments.
    inline: keep f's operations visible to `jax.checkpoint` policies when f is differentiated;
      second derivatives are then JAX's own.
  """

  def decorate(f):
    wrapped = jax.custom_jvp(f, nondiff_argnums=static)

    def rule(*static_args_and_pair):
      *static_args, args, tangents = static_args_and_pair
      all_args = functools.partial(_merge_static, static, static_args)
      leaves, tree = jax.tree.flatten(args)
      nonzero = nonzero_tangent_indices(tangents)
      out = (f if inline else wrapped)(*all_args(args))
      out_leaves, out_tree = jax.tree.flatten(out)

      def run(constants, tangents):
        def of_nonzero(*values):
          new = dict(zip(nonzero, values))
          return jax.tree.leaves(
            f(*all_args(tree.unflatten([new.get(i, x) for i, x in enumerate(constants)])))
          )

        return jax.jvp(of_nonzero, [constants[i] for i in nonzero], list(tangents))[1]

      def transpose(constants, cotangents):
        d = out_tree.unflatten(cotangents)
        grads = jax.tree.leaves(backward(*static_args, tree.unflatten(constants), d))
        floating = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]
        by_leaf = dict(zip(floating, grads, strict=True))
        return [by_leaf[i] for i in nonzero]

      flat = jax.tree.leaves(tangents)
      d_out = apply_linear_map(run, transpose, leaves, [flat[i] for i in nonzero], out_leaves)
      return out, out_tree.unflatten(d_out)

    wrapped.defjvp(rule, symbolic_zeros=True)
    return functools.wraps(f)(wrapped)

  return decorate


def reverse_only(args, message: str):
  """Return args (a pytree of arrays or None); forward-mode autodiff raises TypeError(message)."""

  @jax.custom_jvp
  def identity(args):
    return args

  def rule(primals, tangents):
    leaves, tree = jax.tree.flatten(primals[0])
    flat, nonzero = jax.tree.leaves(tangents[0]), nonzero_tangent_indices(tangents[0])

    def run(*_):
      raise TypeError(message)

    transpose = lambda _, cotangents: list(cotangents)
    likes = [leaves[i] for i in nonzero]
    out = apply_linear_map(run, transpose, [], [flat[i] for i in nonzero], likes)
    new = dict(zip(nonzero, out))
    return primals[0], tree.unflatten([new.get(i, flat[i]) for i in range(len(leaves))])

  identity.defjvp(rule, symbolic_zeros=True)
  return identity(args)


def _merge_static(static, static_args, args):
  """Return all arguments in their original order."""
  args = list(args)
  for position, x in sorted(zip(static, static_args)):
    args.insert(position, x)
  return args


def nonzero_tangent_indices(tangents):
  """Return the indices of the leaves whose tangent is not symbolically zero."""
  return [
    i
    for i, t in enumerate(jax.tree.leaves(tangents))
    if not isinstance(t, SymbolicZero) and t.dtype != jax.dtypes.float0
  ]


def apply_linear_map(run, transpose, constants, tangents, outs):
  """Return run(constants, tangents), a linear map of the tangents with an explicit transpose.

  Args:
    run: (constants, tangents) -> outputs, linear in the tangents; only called by forward mode.
    transpose: (constants, cotangents) -> one gradient per tangent.
    outs: arrays with the shapes and dtypes of the outputs.
  """
  shapes = tuple((x.shape, x.dtype) for x in outs)
  return _linear_map.bind(
    *constants, *tangents, run=run, transpose=transpose, count=len(constants), shapes=shapes
  )


@_linear_map.def_impl
def _run(*operands, run, count, **_):
  return run(operands[:count], operands[count:])


@_linear_map.def_abstract_eval
def _abstract(*_, shapes, **__):
  return [jax.core.ShapedArray(*shape) for shape in shapes]


def _jvp(primals, tangents, **params):
  nonzero = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]

  def of_nonzero(*values):
    new = dict(zip(nonzero, values))
    return _run(*(new.get(i, x) for i, x in enumerate(primals)), **params)

  return jax.jvp(of_nonzero, [primals[i] for i in nonzero], [tangents[i] for i in nonzero])


def _transpose(cotangents, *operands, transpose, count, **_):
  grads = transpose(operands[:count], [ad.instantiate_zeros(d) for d in cotangents])
  wanted = [ad.is_undefined_primal(x) for x in operands[count:]]
  return [None] * count + [d if w else None for d, w in zip(grads, wanted, strict=True)]


def _batch(operands, axes, *, run, transpose, count, shapes):
  size = next(x.shape[a] for x, a in zip(operands, axes) if a is not None)
  constant_axes, tangent_axes = tuple(axes[:count]), tuple(axes[count:])

  def transpose_all(constants, cotangents):
    one = lambda constants, cotangents: tuple(transpose(constants, cotangents))
    grads = jax.vmap(one, in_axes=(constant_axes, 0))(tuple(constants), list(cotangents))
    return [
      d.sum(axis=0) if a is None else jnp.moveaxis(d, 0, a) for d, a in zip(grads, tangent_axes)
    ]

  def run_all(constants, tangents):
    return jax.vmap(run, in_axes=(constant_axes, tangent_axes), axis_size=size)(
      tuple(constants), tuple(tangents)
    )

  shapes = tuple(((size, *shape), dtype) for shape, dtype in shapes)
  outs = _linear_map.bind(
    *operands, run=run_all, transpose=transpose_all, count=count, shapes=shapes
  )
  return outs, [0] * len(outs)


ad.primitive_jvps[_linear_map] = _jvp
ad.primitive_transposes[_linear_map] = _transpose
batching.primitive_batchers[_linear_map] = _batch
mlir.register_lowering(_linear_map, mlir.lower_fun(_run, multiple_results=True))
