"""Kernels compile for TPUs and GPUs, and their static resource usage does not regress."""

import pytest

from deltanet_jax.chips import CHIPS
from experiments.aot import kernel_cases, kernel_programs, targets
from experiments.aot.resources import blocks_per_sm
from experiments.aot.worker import Worker
from pallas_kernels.common.tiling import TPU_VMEM_LIMIT

# VLIW bundles per token and head at d = 128, bfloat16, by (inputs, program[, heads if not 16]).
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
MAX_HBM_OVER_MINIMUM = 1.1
TOLERANCE = 0.05  # relative

# Inputs -> kernel -> registers, barriers, asynchronous copies, matmul shapes, blocks per SM.
H100_RESOURCES = {
  "plain": dict(
    delta_rule_intra=(132, 8, 0, "m64n64", 3),
    delta_rule_fwd=(169, 16, 48, "m64n32 m64n64", 2),
    delta_rule_states=(230, 16, 34, "m64n64", 2),
    delta_rule_dstates=(168, 27, 48, "m64n32 m64n64", 2),
    delta_rule_grads=(168, 28, 0, "m64n64", 3),
    head_norm_bwd=(72, 11, 0, "", 7),
    short_conv_bwd=(175, 143, 0, "", 5),  # fused for q, k and v
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


def compile_all(target, inputs, dtype="bfloat16"):
  """Key and metrics of every kernel at d = 128, merged into one dict each."""
  platform = CHIPS[target].platform
  chunk = kernel_cases.CHUNKS[platform]
  kernels = []
  with Worker(targets.one(target), dump=True) as worker:
    for program in kernel_cases.PROGRAMS[platform]:
      case = kernel_cases.KernelCase(program, dtype, 128, 128, chunk, inputs).with_supported_chunk(
        target
      )
      if not case.supported(target):
        continue
      found = worker.call(kernel_programs.measure, target, case)
      kernels += [key | metrics for key, metrics in found]
  assert not [
    (metrics["kernel"], metrics["error"]) for metrics in kernels if not metrics["compiles"]
  ]
  return kernels


@pytest.mark.aot
@pytest.mark.parametrize("target", BUNDLES)
def test_bundles_of_tpu_kernels_do_not_regress(target):
  with Worker(targets.one(target), dump=True) as worker:
    for (inputs, program, *heads), bundles in BUNDLES[target].items():
      case = kernel_cases.KernelCase(program, "bfloat16", 128, 128, 128, inputs, *heads)
      ((key, metrics),) = worker.call(
        kernel_programs.measure, target, case.with_supported_chunk(target)
      )
      assert metrics["compiles"], (key, metrics["error"])
      assert metrics["bundles_per_token_head"] == pytest.approx(bundles, rel=TOLERANCE), key
      assert (
        not metrics["bundles_per_loop_iteration"] and metrics["vmem_bytes"] <= TPU_VMEM_LIMIT
      ), key
      if inputs == "plain" and program in ("forward", "step"):
        assert metrics["hbm_over_minimum"] <= MAX_HBM_OVER_MINIMUM, key


# Bundles per iteration of the loop over blocks of 512 tokens, two heads of 64: [unmasked, masked].
ATTENTION_BUNDLES = {
  "v5e": {"attention forward": [2325, 2565], "attention backward": [4108, 4500]},
  "v6e": {"attention forward": [1775, 2085], "attention backward": [2354, 2735]},
}


@pytest.mark.aot
@pytest.mark.parametrize("target", ATTENTION_BUNDLES)
def test_bundles_of_tpu_attention_do_not_regress(target):
  with Worker(targets.one(target), dump=True) as worker:
    for program, bundles in ATTENTION_BUNDLES[target].items():
      case = kernel_cases.KernelCase(program, "bfloat16", 64, 64, None, "plain")
      ((key, metrics),) = worker.call(kernel_programs.measure, target, case)
      assert metrics["compiles"], (key, metrics["error"])
      assert metrics["bundles_per_loop_iteration"] == pytest.approx(bundles, rel=TOLERANCE), key
      assert metrics["hbm_over_minimum"] <= 1.15 and metrics["vmem_bytes"] <= TPU_VMEM_LIMIT, key


@pytest.mark.aot
@pytest.mark.parametrize("target", ["h100", "a100", "b200"])
def test_gpu_attention_does_not_spill(target):
  """With segments. Each array crosses HBM once; occupancy is the one the tiles were chosen for."""
  blocks = {}
  with Worker(targets.one(target), dump=True) as worker:
    for d in (64, 128):
      for program in ("attention forward", "attention backward"):
        case = kernel_cases.KernelCase(program, "bfloat16", d, d, None, "full")
        ((key, metrics),) = worker.call(kernel_programs.measure, target, case)
        assert metrics["compiles"], (key, metrics["error"])
        assert metrics["spill_bytes"] == 0 and metrics["hbm_over_minimum"] <= 1.02, key
        blocks[d, program] = metrics["blocks_per_sm"]
  small = dict(h100=2, a100=2, b200=1)[target]
  assert list(blocks.values()) == [2, small, 1, 1], blocks


@pytest.mark.aot
def test_float32_matmuls_take_six_bfloat16_passes_on_tpu():
  matmuls = {}  # instructions per token and head
  with Worker(targets.one("v6e"), dump=True) as worker:
    for dtype in ("bfloat16", "float32"):
      case = kernel_cases.KernelCase("forward", dtype, 128, 128, 128, "plain")
      ((_, metrics),) = worker.call(kernel_programs.measure, "v6e", case)
      assert set(metrics["matmul_instructions"]) == {"bf16"}
      # A grid step has a different number of heads for each dtype.
      matmuls[dtype] = (
        metrics["matmul_instructions"]["bf16"]
        * metrics["bundles_per_token_head"]
        / metrics["bundles_per_grid_step"]
      )
  assert matmuls["float32"] >= 6 * matmuls["bfloat16"]


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
  for metrics in compile_all(target, inputs, dtype):
    assert metrics["shared_bytes"] <= limit, metrics["kernel"]
    assert not any("tf32" in kind for kind in metrics["matmul_instructions"]), metrics["kernel"]
    if target == "h100" or (
      inputs == "per_channel_full" and not metrics["kernel"].endswith("_step")
    ):
      assert metrics["spill_bytes"] == 0, metrics["kernel"]


@pytest.mark.aot
@pytest.mark.parametrize("inputs", H100_RESOURCES)
def test_resources_of_h100_kernels_do_not_regress(inputs):
  kernels = {metrics["kernel"]: metrics for metrics in compile_all("h100", inputs)}
  for kernel, (registers, barriers, copies, shapes, blocks) in H100_RESOURCES[inputs].items():
    metrics = kernels[kernel]
    assert metrics["spill_bytes"] == 0, kernel
    assert metrics["registers"] == pytest.approx(registers, rel=TOLERANCE), kernel
    assert metrics["barriers"] == pytest.approx(barriers, rel=TOLERANCE), kernel
    assert metrics["async_copies"] == pytest.approx(copies, rel=TOLERANCE), kernel
    found = {
      shape for shape in shapes.split() for kind in metrics["matmul_instructions"] if shape in kind
    }
    assert found == set(shapes.split()) and len(found) == len(metrics["matmul_instructions"]), (
      kernel
    )
    assert metrics["blocks_per_sm"] == blocks, kernel


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
