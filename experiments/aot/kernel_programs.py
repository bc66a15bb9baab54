"""Programs around single kernels, compiled for a chip, and their static resource usage."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from deltanet_jax.chips import CHIPS
from deltanet_jax.ops import causal_attention, head_norm, rope, short_conv, short_convs
from deltanet_jax.ops.epilogue import Epilogue
from experiments.aot import targets
from experiments.aot.hlo import HloModule
from experiments.aot.kernel_cases import KernelCase, record_keys
from experiments.aot.resources import gpu_resources, tpu_resources
from experiments.aot.worker import compile_function, tracing_for

# A training batch whose arrays each exceed any on-chip memory, and a decoding batch.
BATCH, LENGTH, DECODE_BATCH = 16, 2048, 128
WAVES_BATCH = 8  # batch size for which waves of GPU blocks are reported


@dataclasses.dataclass(frozen=True)
class KernelProgram:
  """A function to compile and the minimum HBM traffic of what it computes."""

  run: Callable
  args: tuple  # trees of ShapeDtypeStructs
  minimum_hbm_bytes: int  # every input read once, every output written once
  token_heads: int  # batch size x length x heads
  donate: tuple[int, ...] = ()


def measure(target: str, case: KernelCase) -> list[tuple[dict, dict]]:
  """Compile a case and read the resource usage of each of its kernels. Call it in a `Worker`.

  Returns:
    Record key and metrics of each kernel.
  """
  platform, machine = CHIPS[target].platform, targets.one(target)
  try:
    with tracing_for(machine):  # residuals depend on the target
      program = build(target, case)
    compiled = compile_function(machine, program.run, program.args, program.donate)
  except Exception as error:  # any compiler error is a result
    return failures(target, case, error)
  moves = HloModule(compiled.hlo).moves()
  kernel_bytes = {move.kernel: move.kernel_bytes for move in moves if move.kernel}
  program_bytes = sum(move.bytes for move in moves)
  results = []
  for key in record_keys(target, case):
    kernel = key["kernel"]
    if platform == "tpu":
      found = tpu_resources(compiled, kernel)
      steps = math.prod(compiled.grids[kernel])
      # The trip count of a loop inside a kernel is unknown.
      bundles = found["bundles_per_grid_step"] * steps / program.token_heads
      found["bundles_per_token_head"] = None if found["bundles_per_loop_iteration"] else bundles
    else:
      found = gpu_resources(compiled, kernel)
      found |= dict(tile=_tile(machine, case, kernel), waves=_waves(compiled, kernel, found))
    size = kernel_bytes[kernel if kernel in kernel_bytes else "triton_kernel_call"]
    metrics = dict(
      compiles=True,
      error=None,
      **found,
      hbm_bytes=size,
      minimum_hbm_bytes=program.minimum_hbm_bytes,
      hbm_over_minimum=size / program.minimum_hbm_bytes,
      program_hbm_over_minimum=program_bytes / program.minimum_hbm_bytes,
      compile_seconds=compiled.lower_seconds.wall + compiled.compile_seconds.wall,
      compile_cpu_seconds=compiled.lower_seconds.cpu + compiled.compile_seconds.cpu,
    )
    results.append((key, metrics))
  return results


def failures(target: str, case: KernelCase, error: Exception) -> list[tuple[dict, dict]]:
  """Record keys and metrics of a program that does not compile."""
  first = (str(error).strip() or type(error).__name__).splitlines()[0]
  return [(key, dict(compiles=False, error=first)) for key in record_keys(target, case)]


def build(target: str, case: KernelCase) -> KernelProgram:
  """The program of a case."""
  platform = CHIPS[target].platform
  if case.is_auxiliary:
    return _auxiliary(case, platform)
  if case.program.startswith("UT"):
    return _ut(case, 10 * CHIPS[target].nvidia.major)
  # Imported here: the packages load Pallas for one platform at a time.
  if platform == "tpu":
    from pallas_kernels.delta_rule import delta_rule_step_tpu, delta_rule_tpu
    from pallas_kernels.linear_attention import linear_attention_step_tpu, linear_attention_tpu

    delta = delta_rule_tpu, delta_rule_step_tpu
    linear = linear_attention_tpu, linear_attention_step_tpu
  else:
    from pallas_kernels.delta_rule import delta_rule_gpu, delta_rule_step_gpu
    from pallas_kernels.linear_attention import linear_attention_gpu, linear_attention_step_gpu

    delta = delta_rule_gpu, delta_rule_step_gpu
    linear = linear_attention_gpu, linear_attention_step_gpu
  sequence, step = linear if case.is_linear_attention else delta
  return _step(step, case) if case.direction == "step" else _sequence(sequence, case)


def _bytes(*trees) -> int:
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(trees))


def _arrays(case):
  """Inputs of the delta rule or linear attention by name, and segment_ids."""
  dk, dv = case.head_size, case.value_size
  array = lambda *sizes, dtype=jnp.float32: jax.ShapeDtypeStruct((BATCH, *sizes), dtype)
  tokens = lambda d: array(LENGTH, case.heads, d, dtype=jnp.dtype(case.dtype))
  arrays = dict(q=tokens(dk), k=tokens(dk), v=tokens(dv))
  if not case.is_linear_attention:
    arrays["beta"] = array(LENGTH, case.heads)
  segments = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
  if case.inputs in ("plain", "segments"):
    return arrays, segments if case.inputs == "segments" else None
  arrays["g"] = array(LENGTH, case.heads, *([dk] if case.per_channel else []))
  if case.inputs == "per_channel":
    return arrays, None
  arrays["S0"] = array(case.heads, dk, dv)
  return arrays, segments


def _sequence(rule, case):
  """Forward, forward with residuals, or backward of a differentiable operator."""
  arrays, segments = _arrays(case)
  run = lambda x, segments: rule(**x, segment_ids=segments, chunk=case.chunk)
  with_vjp = lambda x, segments: jax.vjp(lambda x: run(x, segments), x)

  def with_residuals(x, segments):
    # Only residuals that are not inputs: jit would copy those, a training step does not.
    outputs, pull = with_vjp(x, segments)
    given = jax.tree.leaves((x, segments))
    return outputs, [y for y in jax.tree.leaves(pull) if not any(y is z for z in given)]

  outputs, pull = jax.eval_shape(with_vjp, arrays, segments)
  forward = _bytes(arrays, segments, outputs)
  tokens = BATCH * LENGTH * case.heads
  match case.direction:
    case "forward":
      return KernelProgram(run, (arrays, segments), forward, tokens)
    case "forward with residuals":
      return KernelProgram(with_residuals, (arrays, segments), forward, tokens)
    case "backward":
      backward = lambda pull, cotangents: pull(cotangents)
      return KernelProgram(backward, (pull, outputs), forward + _bytes(arrays), tokens)


def _step(rule, case):
  """One decoding step."""
  dk, dv = case.head_size, case.value_size
  array = lambda *sizes, dtype=jnp.float32: jax.ShapeDtypeStruct((DECODE_BATCH, *sizes), dtype)
  key, value = (array(case.heads, d, dtype=jnp.dtype(case.dtype)) for d in (dk, dv))
  S = array(case.heads, dk, dv)
  gate = None if case.inputs == "plain" else array(case.heads, *([dk] if case.per_channel else []))
  beta = () if case.is_linear_attention else (array(case.heads),)
  args = (key, key, value, *beta, S, gate)
  minimum = _bytes(args, value, S)
  return KernelProgram(rule, args, minimum, DECODE_BATCH * case.heads, donate=(3 + len(beta),))


def _ut(case, capability):
  """The stand-alone UT transform, in Pallas or jax-triton."""
  from pallas_kernels.common import bf16
  from pallas_kernels.delta_rule.ut import pallas

  options = dict(chunk=case.chunk)
  precision = bf16.inverse_precision(None, jnp.dtype(case.dtype))
  transform = functools.partial(pallas.ut_transform, inverse_precision=precision, **options)
  if case.program == "UT jax-triton":
    from pallas_kernels.delta_rule.ut import triton

    transform = functools.partial(
      triton.ut_transform,
      inverse_precision=precision,
      compute_capability=capability,
      **options,
    )
  arrays, segments = _arrays(case)
  args = (*(arrays.get(x) for x in ("k", "v", "beta", "g")), segments)
  X, W, U = jax.eval_shape(transform, *args)
  minimum, tokens = _bytes(args, W, U), BATCH * LENGTH * case.heads
  if case.program != "UT backward":
    return KernelProgram(transform, args, minimum, tokens)
  backward = functools.partial(pallas.ut_transform_bwd, **options)
  return KernelProgram(backward, (*args, X, W, U, W, U), minimum + _bytes(args[:4]), tokens)


def _auxiliary(case, platform):
  """Short convolutions, per-head norms, attention and rope."""
  segments = None
  if case.inputs == "full":
    segments = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
  shape = (BATCH, LENGTH, case.heads, case.head_size)
  x = jax.ShapeDtypeStruct(shape, jnp.dtype(case.dtype))
  options = dict(implementation=f"pallas_{platform}")
  if case.program.startswith("short conv"):
    width = case.heads * case.head_size
    x, taps = x.update(shape=(BATCH, LENGTH, width)), jax.ShapeDtypeStruct((4, width), jnp.float32)
    epilogue = Epilogue("silu", "l2", case.head_size)
    run = lambda x, taps: (
      lambda ids: short_conv(x, taps, segment_ids=ids, epilogue=epilogue, **options)[0]
    )
    return _forward_or_backward(case, run, (x, taps), segments, x)
  if case.program.startswith("qkv conv"):
    sizes = [case.head_size, case.head_size, case.value_size]
    widths = [case.heads * size for size in sizes]
    taps = [jax.ShapeDtypeStruct((4, width), jnp.float32) for width in widths]
    epilogues = [Epilogue("silu", norm, size) for norm, size in zip(("l2", "l2", None), sizes)]
    out = [x.update(shape=(BATCH, LENGTH, width)) for width in (*widths, case.heads)]
    x = x.update(shape=(BATCH, LENGTH, sum(y.shape[2] for y in out)))
    run = lambda x, *taps: lambda ids: short_convs(x, taps, epilogues, segment_ids=ids)
    return _forward_or_backward(case, run, (x, *taps), segments, out)
  if case.program.startswith("head norm"):
    x = x.update(shape=(BATCH, LENGTH, case.heads * case.head_size))
    scale = jax.ShapeDtypeStruct((case.head_size,), jnp.float32)
    gate = [x] if case.inputs == "full" else []
    norm = lambda x, scale, gate=None: head_norm(
      x, scale, 1e-6, gate=gate, gate_activation=jax.nn.silu, **options
    )
    run = lambda *args: lambda _: norm(*args)
    return _forward_or_backward(case, run, (x, scale, *gate), None, x)
  if case.program.startswith("attention"):
    run = lambda *qkv: lambda ids: causal_attention(*qkv, segment_ids=ids, **options)
    return _forward_or_backward(case, run, (x, x, x), segments, x)
  positions = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
  run = lambda x: lambda positions: rope(x, positions, **options)
  return _forward_or_backward(case, run, (x,), positions, x)


def _forward_or_backward(case, run, arrays, ids, out):
  """The program of run(*arrays)(ids) -> out, differentiated with respect to `arrays`."""
  tokens = BATCH * LENGTH * case.heads
  minimum = _bytes(arrays, ids, out)
  if not case.program.endswith("backward"):
    forward = lambda arrays, ids: run(*arrays)(ids)
    return KernelProgram(forward, (arrays, ids), minimum, tokens)
  backward = lambda arrays, ids, d: jax.vjp(lambda *x: run(*x)(ids), *arrays)[1](d)
  return KernelProgram(backward, (arrays, ids, out), minimum + _bytes(arrays), tokens)


def _tile(machine, case, kernel):
  """[block_k, block_v, warps, stages] of a GPU kernel, None for a kernel without a tile table.

  For attention the first two are tokens per block and tokens per loop iteration of the other side.
  """
  from pallas_kernels.attention.pallas_gpu import tiles as attention_tiles
  from pallas_kernels.delta_rule.pallas_gpu import tiles

  if case.program.startswith("attention"):
    with tracing_for(machine):
      part = kernel.removeprefix("attention_")
      return list(attention_tiles.tile_for(part, LENGTH, case.head_size))
  name = kernel.removeprefix("delta_rule_").removeprefix("linear_attention_")
  name = {"_ut_kernel": "ut_triton"}.get(kernel, name)
  if name == "step" or case.is_auxiliary:
    return None
  with tracing_for(machine):
    kind = dict(
      gated=case.inputs == "full",
      delta_rule=not case.is_linear_attention,
      per_channel=case.per_channel,
    )
    return list(tiles.tile_for(name, _arrays(case)[0]["k"], **kind))


def _waves(compiled, kernel, found):
  """Waves: blocks of a kernel at batch size WAVES_BATCH over blocks resident on the whole GPU.

  None for a decoding step.
  """
  if kernel not in compiled.grids or kernel.endswith("_step"):
    return None
  blocks = math.prod(compiled.grids[kernel]) * WAVES_BATCH / BATCH
  return blocks / (compiled.machine.chip.nvidia.cores * found["blocks_per_sm"])
