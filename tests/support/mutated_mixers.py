"""A mixer whose source has been changed, to see whether tests notice."""

import dataclasses
import inspect
import sys
import types

import jax
from flax import nnx

from deltanet_jax.mixers import mixer_class
from tests.support.mixers import CASES, D, make


def _changed_class(kind, old, new):
  original = mixer_class(kind)
  source = inspect.getsource(sys.modules[original.__module__])
  assert old in source, f"{old!r} is not in the source of {kind}."
  module = types.ModuleType("changed_mixer")
  # Decorators of the settings look their module up.
  sys.modules[module.__name__] = module
  try:
    exec(compile(source.replace(old, new), "changed_mixer", "exec"), module.__dict__)
  finally:
    del sys.modules[module.__name__]
  return getattr(module, original.__name__)


def _given(cfg):
  """What the case itself sets; the rest are defaults, and those may have changed."""
  fields = ((field, getattr(cfg, field.name)) for field in dataclasses.fields(cfg))
  return {field.name: value for field, value in fields if value != field.default}


def make_changed(name, old, new):
  """The mixer and the input of `make`, `old` replaced by `new` in the mixer's module."""
  changed = _changed_class(CASES[name].kind, old, new)
  cfg = changed.Config(**_given(CASES[name]))
  mixer = jax.eval_shape(lambda: changed(cfg, D, rngs=nnx.Rngs(params=0)))
  original, x = make(name)
  weights = jax.tree.leaves(original)
  assert [w.shape for w in weights] == [w.shape for w in jax.tree.leaves(mixer)]
  return jax.tree.unflatten(jax.tree.structure(mixer), weights), x
