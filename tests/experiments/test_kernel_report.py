"""Every kernel compiles for v5e, v6e, H100 and A100 at d = 128 and keeps its budgets."""

import re

import jax
import jax.numpy as jnp
import pytest
from experiments.hlo_bytes import hbm_bytes

from deltanet_jax.generate.loop import Decoding, decode
from deltanet_jax.generate.sample import Sampling
from deltanet_jax.models import preset
from deltanet_jax.models.build import abstract
from deltanet_jax.ops import l2_norm
from experiments import ahead_of_time as aot
from experiments import kernel_programs
from pallas_kernels.tiling import TPU_VMEM_LIMIT

# Bundles per token and head of the forward at most; spills none on H100.
BUNDLES = {"v5e": 9.0, "v6e": 7.0}
BACKWARD_OVER_FORWARD = 3.0
BYTES_OVER_MINIMUM = 1.1


def report(target, inputs, dtype="bfloat16"):
  platform = aot.TARGETS[target].platform
  chunk = kernel_programs.CHUNKS[platform]
  rows = []
  with aot.Worker(target) as worker:
    for program in kernel_programs.PROGRAMS[platform]:
      case = kernel_programs.Case(program, dtype, 128, 128, chunk, inputs).normal(target)
      rows += worker.call(kernel_programs.measure, target, case)
  assert not [(row["kernel"], row["error"]) for row in rows if not row["compiles"]]
  return rows


@pytest.mark.aot
@pytest.mark.parametrize("target", BUNDLES)
def test_tpu_kernels_compile(target):
  rows = {row["program"]: row for row in report(target, "plain")}
  forward = rows["forward"]["bundles_per_token_head"]
  assert not any(row["loops"] for row in rows.values())
  assert all(row["vmem_bytes"] <= TPU_VMEM_LIMIT for row in rows.values())
  assert forward <= BUNDLES[target]
  assert rows["backward"]["bundles_per_token_head"] <= BACKWARD_OVER_FORWARD * forward
  for program in ("forward", "step"):
    assert rows[program]["bytes_over_minimum"] <= BYTES_OVER_MINIMUM, program


@pytest.mark.aot
def test_float32_products_take_six_passes_on_tpu():
  """The matrix unit multiplies bfloat16: float32 needs six times its instructions, never one."""
  products = {}
  with aot.Worker("v6e") as worker:
    for dtype in ("bfloat16", "float32"):
      case = kernel_programs.Case("forward", dtype, 128, 128, 128, "plain")
      (row,) = worker.call(kernel_programs.measure, "v6e", case)
      assert set(row["products"]) == {"bf16"}
      # Programs of different dtypes take different numbers of heads at a time.
      products[dtype] = row["products"]["bf16"] * row["bundles_per_token_head"] / row["bundles"]
  assert products["float32"] >= 6 * products["bfloat16"]


@pytest.mark.aot
@pytest.mark.parametrize(
  "target,dtype", [("h100", "bfloat16"), ("h100", "float32"), ("a100", "bfloat16")]
)
def test_gpu_kernels_compile(target, dtype):
  limit = aot.TARGETS[target].gpu["shared_per_block"]
  for row in report(target, "full", dtype):
    assert row["shared_bytes"] <= limit, row["kernel"]
    assert not any("tf32" in kind for kind in row["products"]), row["kernel"]
    if target == "h100":
      assert row["spill_bytes"] == 0, row["kernel"]


def decoding_loop(target):
  """The HLO of eight tokens of a small model on `target`, and the shape of all its states."""
  cfg = preset("deltanet-tiny", dtype="bfloat16", depth=3)
  for mixer in cfg.mixers.values():
    mixer.implementation = "by_platform"
  model = abstract(cfg)
  now = jax.eval_shape(
    lambda model: Decoding(
      model.init_state(8, 16), jnp.zeros(8, jnp.int32), jnp.zeros(8, bool), jax.random.key(0)
    ),
    model,
  )
  stops = jax.ShapeDtypeStruct((0,), jnp.int32)
  run = lambda model, now, stops: decode(model, now, stops, 8, Sampling())
  compiled = aot.compile_for(target, run, (model, now, stops), donate=(1,))
  return compiled.hlo, now.state[0][0]["S"].shape


@pytest.mark.aot
@pytest.mark.parametrize("target", ["v5e", "h100"])
def test_decoding_moves_the_states_once(target):
  """Only the kernel touches the states of all layers: nothing copies, slices or rebuilds them."""
  with aot.Worker(target) as worker:
    hlo, shape = worker.call(decoding_loop, target)
  states = f"f32[{','.join(map(str, shape))}]"
  makers = re.findall(r"= (\(.*?\)|\S+) ([\w-]+)\(", hlo)
  makers = {op for result, op in makers if states in result}
  assert makers - {"parameter", "get-tuple-element", "tuple", "while"} == {"custom-call"}, makers


def head_norm_bytes(target):
  x = jax.ShapeDtypeStruct((16, 2048, 2048), jnp.bfloat16)
  compiled = aot.compile_for(target, lambda x: l2_norm(x, 128), (x,))
  return hbm_bytes(compiled.hlo)[1] / (x.size * x.dtype.itemsize)


@pytest.mark.aot
def test_norms_of_heads_keep_their_layout_on_tpu():
  """Read for the sums, read, written; by a reduction over [B L H d] it is 19 times the array."""
  with aot.Worker("v5e") as worker:
    assert worker.call(head_norm_bytes, "v5e") <= 4.1


def test_missing_wheel_is_named(monkeypatch):
  monkeypatch.setattr(aot, "ptxas", lambda: None)
  assert "nvidia-cuda-nvcc-cu12" in aot.missing("h100")
  assert "pip install -e .[aot]" in aot.missing("h100")


HLO = """
ENTRY %main (x: bf16[4,64]) -> bf16[4,64] {
  %x = bf16[4,64]{1,0:T(8,128)(2,1)} parameter(0)
  %y = (bf16[4,64]{1,0:T(8,128)(2,1)S(1)}, bf16[4,64]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%x)
  %z = bf16[4,64]{1,0:T(8,128)(2,1)S(1)} copy-done(%y)
  ROOT %f.1 = bf16[4,64]{1,0:T(8,128)(2,1)} custom-call(%z, %z), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/transpose(jvp(f))/pallas_call"}
}
"""  # noqa: E501


def test_bytes_of_padded_tiles():
  """A [4, 64] array fills a tile of 8 x 128; from HBM it is read once and written once."""
  assert hbm_bytes(HLO) == ({"f": 2 * 8 * 128 * 2}, 2 * 8 * 128 * 2)
