"""Tile tables of the GPUs: each chip uses its own, and all tiles compute the same."""

import dataclasses
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanet_jax.chips import CHIPS
from deltanet_jax.ops import linear_attention
from deltanet_jax.ops.testing import Spec, cast, with_gradients
from pallas_kernels.common.gpu import compiling_for_gpu
from pallas_kernels.delta_rule.pallas_gpu import tiles
from pallas_kernels.linear_attention import linear_attention_gpu
from tests.support.delta_rule import reference, value_and_grads
from tests.support.tolerances import assert_close

NAMES = {name: chip.nvidia.device_name for name, chip in CHIPS.items() if chip.nvidia}
SPEC = Spec(B=1, L=70, H=1, Hv=2, dk=128, dv=128, gate="scalar", packed=True)


def test_table_of_each_gpu(caplog):
  tiles.table_for.cache_clear()
  found = {name: tiles.table_for(kind) for name, kind in NAMES.items()}
  own = dict(a100=tiles.A100, h100=tiles.H100, h200=tiles.H100, b200=tiles.B200)
  assert all(found[name] is own[name] for name in NAMES)
  assert tiles.table_for(None) is tiles.OTHER and not caplog.records
  for _ in range(2):
    assert tiles.table_for("NVIDIA GeForce RTX 4090") is tiles.OTHER
  (record,) = caplog.records
  assert "RTX 4090" in record.getMessage()


def test_every_table_is_complete():
  kinds = ("full_", "linear_channels_", "linear_", "channels_")
  plain = lambda name: next((name.removeprefix(x) for x in kinds if name.startswith(x)), name)
  kernels = {name for name in tiles.OTHER["bfloat16", 64] if plain(name) == name}
  for table in (*tiles.TILES.values(), tiles.OTHER):
    assert table.keys() == tiles.OTHER.keys()
    for own in table.values():
      # `dscores` exists only with per-channel gates.
      assert kernels | {"channels_dscores"} <= own.keys()
      assert {plain(name) for name in own} == kernels | {"dscores"}


@pytest.mark.parametrize(
  "chip,dtype,gate",
  [
    *itertools.product(["a100", "h100", "b200"], ["bfloat16", "float32"], ["scalar"]),
    ("h100", "bfloat16", "vector"),
    ("h100", "bfloat16", "none"),  # scores in place
  ],
)
def test_all_tables_compute_the_same(chip, dtype, gate):
  inputs, want = reference(dataclasses.replace(SPEC, gate=gate), dtype)
  options = dict(implementation="pallas_gpu", interpret=True)
  with compiling_for_gpu(NAMES[chip]):
    assert_close(value_and_grads(inputs, dtype, **options), want, dtype)


@pytest.mark.parametrize("gate,scores", [("none", 0), ("scalar", 1)])
def test_scores_are_residuals_only_with_gates_on_h100(gate, scores):
  """The scores are the only residuals of linear attention besides its inputs."""
  x = jnp.zeros((1, 128, 2, 128), "bfloat16")
  g = None if gate == "none" else jnp.zeros(x.shape[:3], "float32")
  with compiling_for_gpu(NAMES["h100"]):
    rule = lambda q, k, v: linear_attention_gpu(q, k, v, g, interpret=True)[0]
    _, pull = jax.vjp(rule, x, x, x)
  saved = [y.shape for y in jax.tree.leaves(pull) if y.shape[-2:] == (64, 64)]
  assert saved == [(2, 1, 2, 64, 64)] * scores


def test_linear_attention_with_scores_in_place():
  spec = dataclasses.replace(SPEC, gate="none", dv=32)
  inputs = {name: x for name, x in reference(spec, "bfloat16")[0].items() if name != "beta"}
  run = lambda dtype, **options: with_gradients(partial(linear_attention, **options))(
    cast(inputs, dtype), (np.ones((1, 70, 2, 32)), np.ones((1, 2, 128, 32)))
  )
  want = run("float64", implementation="recurrent")
  with compiling_for_gpu(NAMES["h100"]):
    got = run("bfloat16", implementation="pallas_gpu", interpret=True)
  assert_close(got, want, "bfloat16")
