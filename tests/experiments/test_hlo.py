"""Static analysis of HLO text: trip counts, FLOPs, HBM traffic, collectives."""

import pytest

from experiments.aot.hlo import HloModule, arrays

# A loop with a known trip count of 3, one whose trip count (8 - 0) / 2 has to be derived, an async
# all-gather in two fusions, a reduce-scatter as libtpu emits it, and a padded convolution.
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
  %sum = u32[] add(%i.2, %two)
  %next = u32[] copy(%sum)
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


def test_collectives_flops_and_kernels_in_loops_and_fusions():
  program = HloModule(HLO)
  assert program.collectives() == {
    # 3 iterations, and the one in two fusions once: 8 x 8 numbers of 2 bytes each.
    "all-gather": (4, 4 * 128),
    "reduce-scatter": (4, 4 * 256),
  }
  # A collective without replica groups is taken to be between two devices, each sending half.
  assert program.interconnect_bytes() == 2 * 128 + 2 * 256
  # The convolution has two output positions, each with one tap inside: 5 multiply-adds each.
  assert program.matmul_flops() == {"bf16": 3 * 2 * 8**3 + 2 * 48 * 5}
  assert program.kernels() == {"delta_rule_fwd": 3}
  assert not program.unknown_trip_counts


def test_unknown_trip_count_is_reported():
  program = HloModule(HLO.replace("direction=LT", "direction=NE"))
  assert program.collectives()["reduce-scatter"] == (1, 256)
  assert program.unknown_trip_counts == {"while.2"}


def test_all_branches_of_a_conditional_count():
  line = "%b = f32[8,8]{1,0} get-tuple-element(%while.1), index=2"
  branches = "true_computation=%known, false_computation=%known"
  both = f"{line}\n  %c = (f32[8,8]) conditional(%p, %a, %a), {branches}"
  assert HloModule(HLO.replace(line, both)).kernels() == {"delta_rule_fwd": 5}


TILES = """
ENTRY %main (x: bf16[4,64]) -> bf16[4,64] {
  %x = bf16[4,64]{1,0:T(8,128)(2,1)} parameter(0)
  %y = (bf16[4,64]{1,0:T(8,128)(2,1)S(1)}, bf16[4,64]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%x)
  %z = bf16[4,64]{1,0:T(8,128)(2,1)S(1)} copy-done(%y)
  ROOT %f.1 = bf16[4,64]{1,0:T(8,128)(2,1)} custom-call(%z, %z), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/transpose(jvp(f))/pallas_call"}
}
"""  # noqa: E501


def test_hbm_traffic_includes_tile_padding():
  """A [4, 64] array is padded to a tile of 8 x 128; it is read once and written once."""
  copy, kernel = HloModule(TILES).moves()
  assert copy.bytes + kernel.bytes == 2 * 8 * 128 * 2
  assert (copy.kernel, kernel.kernel) == (None, "f")
  assert kernel.kernel_bytes == 2 * 8 * 128 * 2


# Each iteration reads one slice of the stacked weights and writes one of the stacked results.
SLICES = """
HloModule m

%layer (w: f32[3,8], i: s32[], y: f32[3,8]) -> f32[3,8] {
  %w = f32[3,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %y = f32[3,8]{1,0} parameter(2)
  %one = f32[1,8]{1,0} dynamic-slice(%w, %i), dynamic_slice_sizes={1,8}
  ROOT %new = f32[3,8]{1,0} dynamic-update-slice(%y, %one, %i)
}

%body (x: (s32[], f32[3,8], f32[3,8])) -> (s32[], f32[3,8], f32[3,8]) {
  %x = (s32[], f32[3,8]{1,0}, f32[3,8]{1,0}) parameter(0)
  %j = s32[] get-tuple-element(%x), index=0
  %u = f32[3,8]{1,0} get-tuple-element(%x), index=1
  %v = f32[3,8]{1,0} get-tuple-element(%x), index=2
  %f = f32[3,8]{1,0} fusion(%u, %j, %v), kind=kLoop, calls=%layer
  ROOT %out = (s32[], f32[3,8]{1,0}, f32[3,8]{1,0}) tuple(%j, %u, %f)
}

ENTRY %main (a: (s32[], f32[3,8], f32[3,8])) -> (s32[], f32[3,8], f32[3,8]) {
  %a = (s32[], f32[3,8]{1,0}, f32[3,8]{1,0}) parameter(0)
  ROOT %while = (s32[], f32[3,8]{1,0}, f32[3,8]{1,0}) while(%a), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"3"}}
}
"""  # noqa: E501


def test_slices_in_a_loop_count_once_per_iteration():
  (move,) = HloModule(SLICES).moves()
  row, counter = 8 * 4, 4
  assert move.bytes == 3 * (row + row + counter)


# A nested fusion that returns its operand, as libtpu emits operands of a matmul.
NESTED = """
HloModule m

%same (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  ROOT %y = f32[8,8]{1,0} bitcast(%x)
}

%product (a: f32[8,8], b: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  %b = f32[8,8]{1,0} parameter(1)
  %c = f32[8,8]{1,0} fusion(%a), kind=kLoop, calls=%same
  ROOT %d = f32[8,8]{1,0} dot(%c, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (p: f32[8,8], q: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  %q = f32[8,8]{1,0} parameter(1)
  ROOT %r = f32[8,8]{1,0} fusion(%p, %q), kind=kOutput, calls=%product
}
"""


def test_operand_returned_by_a_nested_fusion_is_read():
  (move,) = HloModule(NESTED).moves()
  assert move.bytes == 3 * 8 * 8 * 4
  # Sliced afterwards, only the slice is read.
  dot = "dot(%c, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
  sliced = NESTED.replace("%d = f32[8,8]{1,0}", "%d = f32[2,8]{1,0}")
  sliced = sliced.replace(dot, "dynamic-slice(%c, %b, %b), dynamic_slice_sizes={2,8}")
  (move,) = HloModule(sliced.replace("%r = f32[8,8]", "%r = f32[2,8]")).moves()
  assert move.bytes == (2 * 8 + 2 * 8 + 8 * 8) * 4


@pytest.mark.parametrize(
  "groups, size",
  [
    ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", 4),
    ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0','axis_1'}", 8),
    ("replica_groups=[2,4]<=[8]", 4),
    ("replica_groups={{0,1,2},{3,4,5}}", 3),
  ],
)
def test_interconnect_bytes_by_replica_groups(groups, size):
  """Each device sends all but its own shard, and twice that for an all-reduce."""
  gather = "all-gather(%p.1), channel_id=7,"
  reduce = "all-reduce(%p.2), channel_id=8,"
  hlo = HLO.replace(gather, f"{gather} {groups},").replace(reduce, f"{reduce} {groups},")
  # The all-gather of the loop stays between two devices.
  assert HloModule(hlo).interconnect_bytes() == pytest.approx(
    3 * 64 + 128 * (size - 1) / size + 4 * 256 * (size - 1) / size
  )


@pytest.mark.parametrize(
  "shape, size",
  [
    ("s4[6]{0}", 3),
    ("u16[5]{0}", 10),
    ("f8e4m3fn[2,3]{1,0}", 6),
    ("(bf16[4]{0}, token[], pred[])", 9),
    ("c128[]", 16),
    ("opaque[]", 0),
  ],
)
def test_bytes_of_dtypes(shape, size):
  assert sum(x.bytes for x in arrays(shape)) == size


def test_unknown_dtype_raises():
  with pytest.raises(ValueError, match=r"unknown width, 'f6e2m3'\.$"):
    arrays("(f32[2]{0}, f6e2m3[8]{0})")
