"""Kernels compile for v5e, v6e, H100 and A100 at d = 128, and their counts are what they were."""

import pytest

from deltanet_jax.chips import CHIPS
from experiments.aot import kernel_cases, kernel_programs, targets
from experiments.aot.resources import blocks_per_sm
from experiments.aot.worker import Worker
from pallas_kernels.common.tiling import TPU_VMEM_LIMIT

# Bundles per token and head, d = 128, bfloat16, by inputs and program; its heads if not 16.
BUNDLES = {
  "v5e": {
    ("plain", "forward"): 4.22,
    ("plain", "forward with residuals"): 4.34,
    ("plain", "backward"): 4.82,
    ("plain", "forward", 1): 4.12,
    ("plain", "forward", 4): 4.32,
    ("plain", "backward", 11): 4.85,
    ("plain", "step"): 76.2,
    ("full", "forward"): 4.39,
    ("full", "backward"): 5.89,
    ("plain", "linear attention forward"): 1.27,
    ("plain", "linear attention backward"): 2.48,
    ("full", "linear attention backward"): 3.55,
    ("per_channel_full", "linear attention forward"): 3.94,
    ("per_channel_full", "linear attention backward"): 8.35,
    ("per_channel_full", "forward"): 7.25,
    ("per_channel_full", "backward"): 12.9,
    ("plain", "short conv forward"): 1.55,
    ("plain", "short conv backward"): 3.61,
    ("full", "short conv backward"): 3.95,
  },
  "v6e": {
    ("plain", "forward"): 3.26,
    ("plain", "backward"): 3.83,
    ("plain", "step"): 70.8,
    ("full", "backward"): 5.07,
  },
}
BYTES_OVER_MINIMUM = 1.1
COUNTS_HELD = 0.05  # what is counted may differ by this share

# Inputs -> kernel -> registers, barriers, asynchronous copies, shapes of products, blocks per SM.
H100_COUNTS = {
  "plain": dict(
    delta_rule_intra=(132, 8, 0, "m64n64", 3),
    delta_rule_fwd=(169, 16, 48, "m64n32 m64n64", 2),
    delta_rule_states=(230, 16, 34, "m64n64", 2),
    delta_rule_dstates=(168, 27, 48, "m64n32 m64n64", 2),
    delta_rule_grads=(168, 28, 0, "m64n64", 3),
    head_norm_bwd=(72, 11, 0, "", 7),
    short_conv_bwd=(175, 143, 0, "", 5),  # of q, k and v together
    attention_fwd=(226, 7, 64, "m64n128", 1),
    attention_bwd=(255, 17, 72, "m64n64 m64n128", 1),
  ),
  "segments": dict(
    delta_rule_fwd=(197, 20, 59, "m64n32 m64n64", 2),
    delta_rule_dstates=(191, 30, 59, "m64n32 m64n64", 2),
    delta_rule_grads=(200, 28, 0, "m64n64", 2),
    linear_attention_fwd=(174, 13, 44, "m64n32 m64n64", 2),
  ),
  "full": dict(
    delta_rule_dstates=(144, 42, 60, "m64n32", 2),
    delta_rule_grads=(255, 79, 0, "m64n64", 2),
  ),
  "per_channel": dict(
    delta_rule_intra=(238, 42, 0, "m64n32 m64n64", 2),
    delta_rule_fwd=(148, 21, 0, "m64n32", 3),
    delta_rule_dscores=(168, 12, 24, "m64n64", 3),
    delta_rule_grads=(254, 79, 0, "m64n32", 2),
    linear_attention_scores=(232, 32, 16, "m64n64", 2),
    linear_attention_fwd=(80, 11, 44, "m64n32", 2),
    linear_attention_dscores=(80, 8, 24, "m64n64", 6),
    linear_attention_grads=(221, 59, 0, "m64n32", 2),
  ),
}


def report(target, inputs, dtype="bfloat16"):
  platform = CHIPS[target].platform
  chunk = kernel_cases.CHUNKS[platform]
  rows = []
  with Worker(targets.one(target), dump=True) as worker:
    for program in kernel_cases.PROGRAMS[platform]:
      case = kernel_cases.KernelCase(program, dtype, 128, 128, chunk, inputs).with_supported_chunk(
        target
      )
      if not case.supported(target):
        continue
      found = worker.call(kernel_programs.measure, target, case)
      rows += [key | metrics for key, metrics in found]
  assert not [(row["kernel"], row["error"]) for row in rows if not row["compiles"]]
  return rows


@pytest.mark.aot
@pytest.mark.parametrize("target", BUNDLES)
def test_tpu_kernels_keep_their_counts(target):
  with Worker(targets.one(target), dump=True) as worker:
    for (inputs, program, *heads), bundles in BUNDLES[target].items():
      case = kernel_cases.KernelCase(program, "bfloat16", 128, 128, 128, inputs, *heads)
      ((key, row),) = worker.call(
        kernel_programs.measure, target, case.with_supported_chunk(target)
      )
      assert row["compiles"], (key, row["error"])
      assert row["bundles_per_token_head"] == pytest.approx(bundles, rel=COUNTS_HELD), key
      assert not row["bundles_per_loop_iteration"] and row["vmem_bytes"] <= TPU_VMEM_LIMIT, key
      if inputs == "plain" and program in ("forward", "step"):
        assert row["hbm_over_minimum"] <= BYTES_OVER_MINIMUM, key


# Of one round of a loop over blocks of 512 tokens, for two heads of 64: without and with a mask.
ATTENTION = {
  "v5e": {"attention forward": [2325, 2565], "attention backward": [4108, 4500]},
  "v6e": {"attention forward": [1775, 2085], "attention backward": [2354, 2735]},
}


@pytest.mark.aot
@pytest.mark.parametrize("target", ATTENTION)
def test_attention_keeps_its_counts_on_tpu(target):
  with Worker(targets.one(target), dump=True) as worker:
    for program, bundles in ATTENTION[target].items():
      case = kernel_cases.KernelCase(program, "bfloat16", 64, 64, None, "plain")
      ((key, row),) = worker.call(kernel_programs.measure, target, case)
      assert row["compiles"], (key, row["error"])
      assert row["bundles_per_loop_iteration"] == pytest.approx(bundles, rel=COUNTS_HELD), key
      assert row["hbm_over_minimum"] <= 1.15 and row["vmem_bytes"] <= TPU_VMEM_LIMIT, key


@pytest.mark.aot
@pytest.mark.parametrize("target", ["h100", "a100", "b200"])
def test_attention_on_gpu_spills_nothing(target):
  """With documents, and each array crosses HBM once; blocks per SM are what chose the tiles."""
  blocks = {}
  with Worker(targets.one(target), dump=True) as worker:
    for d in (64, 128):
      for program in ("attention forward", "attention backward"):
        case = kernel_cases.KernelCase(program, "bfloat16", d, d, None, "full")
        ((key, row),) = worker.call(kernel_programs.measure, target, case)
        assert row["compiles"], (key, row["error"])
        assert row["spill_bytes"] == 0 and row["hbm_over_minimum"] <= 1.02, key
        blocks[d, program] = row["blocks_per_sm"]
  small = dict(h100=2, a100=2, b200=1)[target]
  assert list(blocks.values()) == [2, small, 1, 1], blocks


@pytest.mark.aot
def test_float32_products_take_six_passes_on_tpu():
  """The matrix unit multiplies bfloat16: float32 needs six times its instructions, never one."""
  products = {}
  with Worker(targets.one("v6e"), dump=True) as worker:
    for dtype in ("bfloat16", "float32"):
      case = kernel_cases.KernelCase("forward", dtype, 128, 128, 128, "plain")
      ((_, row),) = worker.call(kernel_programs.measure, "v6e", case)
      assert set(row["matmul_instructions"]) == {"bf16"}
      # Programs of different dtypes take different numbers of heads at a time.
      products[dtype] = (
        row["matmul_instructions"]["bf16"]
        * row["bundles_per_token_head"]
        / row["bundles_per_grid_step"]
      )
  assert products["float32"] >= 6 * products["bfloat16"]


@pytest.mark.aot
@pytest.mark.parametrize(
  "target,dtype,inputs",
  [
    ("h100", "bfloat16", "full"),
    ("h100", "float32", "full"),
    ("a100", "bfloat16", "full"),
    ("a100", "bfloat16", "segments"),
    ("h100", "bfloat16", "per_channel_full"),
    ("a100", "bfloat16", "per_channel_full"),
    ("b200", "bfloat16", "per_channel_full"),
  ],
)
def test_gpu_kernels_compile(target, dtype, inputs):
  limit = CHIPS[target].on_chip
  for row in report(target, inputs, dtype):
    assert row["shared_bytes"] <= limit, row["kernel"]
    assert not any("tf32" in kind for kind in row["matmul_instructions"]), row["kernel"]
    if target == "h100" or (inputs == "per_channel_full" and not row["kernel"].endswith("_step")):
      assert row["spill_bytes"] == 0, row["kernel"]


@pytest.mark.aot
@pytest.mark.parametrize("inputs", H100_COUNTS)
def test_gpu_tiles_give_what_chose_them(inputs):
  """H100, bfloat16: registers, barriers, asynchronous copies, products, blocks per SM."""
  rows = {row["kernel"]: row for row in report("h100", inputs)}
  for kernel, (registers, barriers, copies, shapes, blocks) in H100_COUNTS[inputs].items():
    row = rows[kernel]
    assert row["spill_bytes"] == 0, kernel
    assert row["registers"] == pytest.approx(registers, rel=COUNTS_HELD), kernel
    assert row["barriers"] == pytest.approx(barriers, rel=COUNTS_HELD), kernel
    assert row["async_copies"] == pytest.approx(copies, rel=COUNTS_HELD), kernel
    found = {
      shape for shape in shapes.split() for kind in row["matmul_instructions"] if shape in kind
    }
    assert found == set(shapes.split()) and len(found) == len(row["matmul_instructions"]), kernel
    assert row["blocks_per_sm"] == blocks, kernel


@pytest.mark.parametrize(
  "chip,threads,registers,shared,columns,blocks",
  [
    ("h100", 128, 232, 32, 0, 2),  # registers
    ("h100", 128, 100, 108, 0, 2),  # shared memory
    ("a100", 128, 100, 81, 0, 2),
    ("a100", 128, 100, 82, 0, 1),
    ("h100", 32, 32, 0, 0, 32),  # blocks
    ("h100", 1024, 32, 0, 0, 2),  # threads
    ("b200", 128, 144, 64, 256, 2),  # tensor memory
  ],
)
def test_blocks_per_sm(chip, threads, registers, shared, columns, blocks):
  block = dict(threads=threads, registers=registers, shared_bytes=shared * 1024)
  assert blocks_per_sm(CHIPS[chip].nvidia, **block, tensor_memory_columns=columns) == blocks
