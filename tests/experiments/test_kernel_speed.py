"""`kernel_speed` checks implementations before it times them."""

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
def test_all_implementations_agree(curve):
  cases = kernel_speed.prepare(curve, SPEC)
  assert [(x.key["implementation"], x.key["direction"]) for x in cases] == kernel_speed._VARIANTS[
    curve
  ]


def test_an_implementation_with_wrong_results_is_not_timed(monkeypatch):
  """Wrong only in the last head of the last sequence."""
  right = kernel_speed.rule_of

  def rule_of(implementation):
    def wrong(**inputs):
      o, S = delta_rule(**inputs, implementation="chunkwise")
      return o.at[-1, :, -1].multiply(1.01), S

    return wrong if implementation == "chunkwise" else right(implementation)

  monkeypatch.setattr(kernel_speed, "rule_of", rule_of)
  with pytest.raises(
    ValueError, match=r"^o differs from the recurrent form by 1.0e-02: .*chunkwise"
  ):
    kernel_speed.prepare("length", SPEC)


def test_programs_are_timed_alternately():
  calls = []
  runs = {name: lambda name=name: calls.append(name) for name in "ab"}
  best, rounds = timing.best_seconds(runs, rounds=2, budget=0)
  assert rounds == 2 and set(best) == {"a", "b"}
  assert "".join(calls) == "ab" + "aaabbb"  # short runs are repeated three times
