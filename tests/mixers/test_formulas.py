"""Every mixer is its formula: a loop over tokens that knows nothing of this library agrees.

The loops are in `plain`, one file per kind. That they notice wrong constants and signs is tested
too: a changed source is run in place of the mixer's.
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
from tests.support.mutated_mixers import make_changed

TOLERANCE = 1e-9
PLAIN = {
  name: importlib.import_module(f"{numpy_reference.__name__}.{name}")
  for _, name, _ in pkgutil.iter_modules(numpy_reference.__path__)
}
CHANGES = [
  pytest.param(kind, *change, id=f"{kind}-{i}")
  for kind, module in PLAIN.items()
  for i, change in enumerate(module.CHANGES)
]


def error(mixer, x, kind):
  """How far a mixer is from the plain loop with the same weights, for the first row."""
  got = jax.jit(lambda mixer, x: mixer(x))(mixer, x[:1])[0]
  return rel_rms(got, PLAIN[kind].plain(mixer, np.asarray(x[0])))


@pytest.mark.parametrize("name", [name for name, cfg in CASES.items() if cfg.kind in PLAIN])
def test_equals_a_loop_written_from_its_formula(name):
  assert error(*make(name), CASES[name].kind) < TOLERANCE


def test_every_mixer_has_a_loop_of_its_own():
  assert set(PLAIN) == set(MIXERS)
  for kind, module in PLAIN.items():
    assert len(module.CHANGES) >= 3, kind
    source = inspect.getsource(module) + inspect.getsource(numpy_reference)
    assert not any(
      line.startswith(("import ", "from ")) and ("deltanet_jax" in line or "jax" in line.split())
      for line in source.splitlines()
    ), kind


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "old", "new"), CHANGES)
def test_a_wrong_constant_or_sign_is_noticed(kind, old, new):
  errors = {}
  for name in (name for name, cfg in CASES.items() if cfg.kind == kind):
    errors[name] = error(*make_changed(name, old, new), kind)
  # Some changes concern a variant of the mixer alone.
  assert max(errors.values()) > 1e4 * TOLERANCE, errors
