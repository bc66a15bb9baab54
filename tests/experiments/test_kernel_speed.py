"""What is timed was checked first."""

import pytest
from absl import flags

from deltanet_jax.ops import delta_rule
from deltanet_jax.ops.testing import Spec
from experiments.bench import kernel_speed, timing

SPEC = Spec(B=2, L=40, H=2, dk=16)


@pytest.fixture(autouse=True)
def parsed():
  flags.FLAGS.mark_as_parsed()


@pytest.mark.parametrize("curve", kernel_speed.CURVES)
def test_all_forms_agree(curve):
  problems = kernel_speed.prepare(curve, SPEC)
  assert [(x.key["form"], x.key["direction"]) for x in problems] == kernel_speed._FORMS[curve]


def test_a_wrong_form_is_not_timed(monkeypatch):
  """Wrong in the last row and head alone."""
  right = kernel_speed.rule_of

  def rule_of(form):
    def wrong(**inputs):
      o, S = delta_rule(**inputs, implementation="chunkwise")
      return o.at[-1, :, -1].multiply(1.01), S

    return wrong if form == "chunkwise" else right(form)

  monkeypatch.setattr(kernel_speed, "rule_of", rule_of)
  with pytest.raises(ValueError, match=r"^o differs from the recurrence by 1.0e-02: .*chunkwise"):
    kernel_speed.prepare("length", SPEC)


def test_rounds_go_over_all_programs():
  calls = []
  runs = {name: lambda name=name: calls.append(name) for name in "ab"}
  best, rounds = timing.best_seconds(runs, rounds=2, budget=0)
  assert rounds == 2 and set(best) == {"a", "b"}
  assert "".join(calls) == "ab" + "aaabbb"  # what turned out to be short, three times
