"""The training step compiled for machines that are not here, and what is read from the program."""

import dataclasses

import pytest
from experiments.hlo_costs import Program

from deltanet_jax.config import DataConfig, DeltaNetConfig, MeshConfig, TrainConfig
from deltanet_jax.models import preset
from experiments import pod_report, pods

# A loop of 3 rounds known to the compiler and one of (8 - 0) / 2 that is not, an asynchronous
# gather spread over two fusions, a reduce-scatter as a TPU writes it, and a padded convolution.
HLO = """
HloModule m

%gather.1 (p.1: bf16[2,8]) -> bf16[8,8] {
  %p.1 = bf16[2,8]{1,0} parameter(0)
  ROOT %all-gather.1 = bf16[8,8]{1,0} all-gather(%p.1), channel_id=7, dimensions={0}, frontend_attributes={chain_id="0"}
}

%all-reduce-scatter.1 (p.2: f32[8,8]) -> f32[2,8] {
  %p.2 = f32[8,8]{1,0} parameter(0)
  %all-reduce.1 = f32[8,8]{1,0} all-reduce(%p.2), channel_id=8, to_apply=%add
  ROOT %slice.1 = f32[2,8]{1,0} slice(%all-reduce.1), slice={[0:2], [0:8]}
}

%known (x.1: (s32[], bf16[2,8], f32[8,8])) -> (s32[], bf16[2,8], f32[8,8]) {
  %x.1 = (s32[], bf16[2,8]{1,0}, f32[8,8]{1,0}) parameter(0)
  %w = bf16[2,8]{1,0} get-tuple-element(%x.1), index=1
  %start = (bf16[2,8]{1,0}, bf16[8,8]{1,0}) all-gather-start(%w), channel_id=1, dimensions={0}
  %done = bf16[8,8]{1,0} all-gather-done(%start)
  %dot.1 = f32[8,8]{1,0} dot(%done, %done), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %kernel = f32[8,8]{1,0} custom-call(%dot.1), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/delta_rule_fwd/pallas_call"}
  ROOT %out.1 = (s32[], bf16[2,8]{1,0}, f32[8,8]{1,0}) tuple(%i, %w, %kernel)
}

%found (x.2: (f32[8,8], u32[])) -> (f32[8,8], u32[]) {
  %x.2 = (f32[8,8]{1,0}, u32[]) parameter(0)
  %two = u32[] constant(2), metadata={op_name="f"}
  %i.2 = u32[] get-tuple-element(%x.2), index=1
  %next = u32[] add(%i.2, %two)
  %y = f32[8,8]{1,0} get-tuple-element(%x.2), index=0
  %part = bf16[2,8]{1,0} fusion(%y), kind=kCustom, calls=%gather.1
  %scattered = f32[2,8]{1,0} fusion(%y), kind=kCustom, calls=%all-reduce-scatter.1
  ROOT %out.2 = (f32[8,8]{1,0}, u32[]) tuple(%y, %next)
}

%below (x.3: (f32[8,8], u32[])) -> pred[] {
  %x.3 = (f32[8,8]{1,0}, u32[]) parameter(0)
  %eight = u32[] constant(8)
  %i.3 = u32[] get-tuple-element(%x.3), index=1
  ROOT %less = pred[] compare(%i.3, %eight), direction=LT
}

ENTRY %main (a: (s32[], bf16[2,8], f32[8,8])) -> f32[8,8] {
  %a = (s32[], bf16[2,8]{1,0}, f32[8,8]{1,0}) parameter(0)
  %while.1 = (s32[], bf16[2,8]{1,0}, f32[8,8]{1,0}) while(%a), condition=%c, body=%known, backend_config={"known_trip_count":{"n":"3"}}
  %zero = u32[] constant(0)
  %b = f32[8,8]{1,0} get-tuple-element(%while.1), index=2
  %init = (f32[8,8]{1,0}, u32[]) tuple(%b, %zero)
  %while.2 = (f32[8,8]{1,0}, u32[]) while(%init), condition=%below, body=%found
  %whole = bf16[8,8]{1,0} fusion(%b), kind=kCustom, calls=%gather.1
  %e = bf16[4,5,1]{2,1,0} parameter(1)
  %k = bf16[5,6,2]{2,1,0} parameter(2)
  ROOT %conv = bf16[4,6,2]{2,1,0} convolution(%e, %k), window={size=2 pad=1_1 rhs_reversal=1}, dim_labels=bf0_io0->bf0
}
"""  # noqa: E501


def test_loops_and_fusions_are_counted():
  program = Program(HLO)
  assert program.collectives() == {
    # 3 rounds, and the one in two fusions once: 8 x 8 numbers of 2 bytes each time.
    "all-gather": (4, 4 * 128),
    "reduce-scatter": (4, 4 * 256),
  }
  # The convolution has two places, each with one tap inside: 5 products for each of 4 x 6 x 2.
  assert program.product_flops() == {"bf16": 3 * 2 * 8**3 + 2 * 48 * 5}
  assert program.kernels() == {"delta_rule_fwd": 3}
  assert not program.unknown


def test_a_loop_without_a_count_is_named():
  program = Program(HLO.replace("direction=LT", "direction=NE"))
  assert program.collectives()["reduce-scatter"] == (1, 256)
  assert program.unknown == {"while.2"}


@pytest.mark.parametrize(
  "name", ["h100", "h100x0", "h100x12", "v5e:4", "v9:2x2", "v5ex8", "h100:2x2"]
)
def test_a_wrong_target_is_one_sentence(name):
  with pytest.raises(ValueError, match=r"^target is .*\.$"):
    pods.machine(name)


def _config(fsdp, **changes):
  mixer = DeltaNetConfig(key_size=64, value_size=64)
  model = preset("deltanet-tiny", width=128, mixers={"deltanet": mixer}, dtype="bfloat16")
  return TrainConfig(
    model=dataclasses.replace(model, remat="full"),
    data=DataConfig(length=256, batch=16),
    mesh=MeshConfig(data=1, fsdp=fsdp),
    tokens=2**16,
    grad_accum=2,
    loss_chunk=128,
    **changes,
  )


@pytest.mark.aot
@pytest.mark.parametrize("name, devices", [("h100x8", 8), ("v5e:2x2", 4)])
def test_a_small_model_is_compiled(name, devices):
  cfg = _config(devices)
  row = pods.compile_update(cfg, pods.machine(name)) | dict(config="tiny")
  assert row["devices"] == devices and row["fits"] and not row["unknown_loops"]
  assert row["memory"]["total"] == sum(n for part, n in row["memory"].items() if part != "total")
  # Weights, moments and rows are split: no device has more than its share and the padding of tiles.
  assert row["memory"]["arguments"] * devices < 1.05 * row["argument_bytes"]
  # One forward kernel for each layer and part, and once more where remat repeats it.
  assert row["kernels"]["delta_rule_fwd"] == 2 * cfg.model.depth * cfg.grad_accum
  # Each weight is gathered for every part at least once, and each gradient brought together.
  gathered = row["collectives"]["all-gather"]["bytes"]
  assert gathered >= row["parameters"]
  # Forward, backward and all that remat repeats but the last product of a layer.
  products = sum(row["product_flops"].values()) * devices
  weights = row["parameters"] - cfg.model.vocab * cfg.model.width
  tokens = cfg.data.batch * cfg.data.length
  assert 3 <= products / (2 * weights * tokens) <= 4
  assert "It fits" in pod_report.tell(row)
  assert pod_report.markdown([row]).count("\n") == 3
