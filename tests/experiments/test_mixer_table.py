"""The table of mixers."""

import pytest

from deltanet_jax.mixers import MIXERS, mixer_class
from experiments.lib import mixer_table, provenance


@pytest.fixture(scope="module")
def markdown():
  return mixer_table.markdown(list(MIXERS))


@pytest.mark.parametrize("path", ["README.md", "deltanet_jax/mixers/README.md"])
def test_readmes_have_the_current_table(path, markdown):
  text = (provenance.CHECKOUT / path).read_text()
  if path != "README.md" or "| efficient form" in text:
    assert markdown in text, "run `python -m experiments.models --mixers --markdown`"


def test_operator_state_and_kernels_of_each_mixer(markdown):
  header, *rows = mixer_table.text(["attention", "deltanet"]).splitlines()
  assert header.split("  ")[0] == "mixer" and header.endswith("efficient form")
  # KV cache: keys and values of 32 heads of size 64; state: 16 heads of 128 x 128.
  assert "4,096 per token" in rows[0] and f"{16 * 128**2:,}" in rows[1]
  assert markdown.count("\n") == 2 + len(MIXERS)
  for kind in MIXERS:
    mixer = mixer_class(kind)
    assert mixer.decode in ("state", "cache", "history")
    assert all((mixer.operator, mixer.efficient_form, mixer.kernels)), kind
