"""Mutation testing of mixers: replace one expression in a mixer's source and build the result."""

import dataclasses
import inspect
import sys
import types

import jax
from flax import nnx

from deltanet_jax.mixers import mixer_class
from tests.support.mixers import CASES, D, make


def mutated_source(kind, old, new):
  """Source of the module that defines this mixer, with `old` replaced by `new`.

  Raises:
    ValueError: `old` does not occur exactly once, so the mutation is stale or ambiguous.
  """
  module = sys.modules[mixer_class(kind).__module__]
  source = inspect.getsource(module)
  if source.count(old) != 1:
    raise ValueError(
      f"{old!r} occurs {source.count(old)} times in {module.__name__}, expected once: update the"
      f" mutations of {kind!r}."
    )
  return source.replace(old, new)


def _mutated_class(kind, old, new):
  module = types.ModuleType("mutated_mixer")
  # The dataclass decorator looks up the module of a class in sys.modules.
  sys.modules[module.__name__] = module
  try:
    exec(compile(mutated_source(kind, old, new), module.__name__, "exec"), module.__dict__)
  finally:
    del sys.modules[module.__name__]
  return getattr(module, mixer_class(kind).__name__)


def _explicit_fields(cfg):
  """Fields that differ from the defaults; the others keep the defaults, which may be mutated."""
  fields = ((field, getattr(cfg, field.name)) for field in dataclasses.fields(cfg))
  return {field.name: value for field, value in fields if value != field.default}


def make_mutated(name, old, new):
  """Mixer and input of `make(name)`, with `old` replaced by `new` in the mixer's module."""
  mutated = _mutated_class(CASES[name].kind, old, new)
  cfg = mutated.Config(**_explicit_fields(CASES[name]))
  mixer = jax.eval_shape(lambda: mutated(cfg, D, rngs=nnx.Rngs(params=0)))
  original, x = make(name)
  weights = jax.tree.leaves(original)
  assert [w.shape for w in weights] == [w.shape for w in jax.tree.leaves(mixer)]
  return jax.tree.unflatten(jax.tree.structure(mixer), weights), x
