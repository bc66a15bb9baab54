"""Every mixer equals its NumPy reference, a loop over tokens written from its formula.

Mutation tests check that this comparison detects wrong constants and signs: the mixer's source is
changed, and the mutated mixer must differ from the reference.
"""

import importlib
import inspect
import pkgutil

import jax
import numpy as np
import pytest

from deltanet_jax.mixers import MIXERS
from deltanet_jax.ops.testing import rel_rms
from tests.mixers import numpy_reference
from tests.support.mixers import CASES, make
from tests.support.mutated_mixers import make_mutated, mutated_source

TOLERANCE = 1e-9
REFERENCES = {
  name: importlib.import_module(f"{numpy_reference.__name__}.{name}")
  for _, name, _ in pkgutil.iter_modules(numpy_reference.__path__)
}
MUTATIONS = [
  pytest.param(kind, *mutation, id=f"{kind}-{i}")
  for kind, module in REFERENCES.items()
  for i, mutation in enumerate(module.MUTATIONS)
]


def error(mixer, x, kind):
  """Relative RMS error of a mixer against the NumPy loop with its weights, on one sequence."""
  got = jax.jit(lambda mixer, x: mixer(x))(mixer, x[:1])[0]
  return rel_rms(got, REFERENCES[kind].plain(mixer, np.asarray(x[0])))


@pytest.mark.parametrize("name", CASES)
def test_equals_the_numpy_reference(name):
  assert error(*make(name), CASES[name].kind) < TOLERANCE


def test_every_mixer_has_an_independent_reference():
  assert set(REFERENCES) == set(MIXERS)
  for kind, module in REFERENCES.items():
    assert len(module.MUTATIONS) >= 3, kind
    source = inspect.getsource(module) + inspect.getsource(numpy_reference)
    assert not any(
      line.startswith(("import ", "from ")) and ("deltanet_jax" in line or "jax" in line.split())
      for line in source.splitlines()
    ), kind


@pytest.mark.parametrize(("kind", "old", "new"), MUTATIONS)
def test_mutation_applies_to_the_current_source(kind, old, new):
  """The fast half of the test below: finds stale patterns without running a mutated mixer."""
  compile(mutated_source(kind, old, new), kind, "exec")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "old", "new"), MUTATIONS)
def test_a_wrong_constant_or_sign_is_detected(kind, old, new):
  errors = {}
  for name in (name for name, cfg in CASES.items() if cfg.kind == kind):
    errors[name] = error(*make_mutated(name, old, new), kind)
  # Some mutations affect only one variant of the mixer.
  assert max(errors.values()) > 1e4 * TOLERANCE, errors
