"""Every kernel in the program that calls it, with the bytes that its pass must move at least."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from deltanet_jax.chips import CHIPS
from experiments.aot import targets
from experiments.aot.hlo import HloModule as Hlo
from experiments.aot.kernel_cases import KernelCase, keys
from experiments.aot.resources import gpu_resources, tpu_resources
from experiments.aot.worker import compile_function, tracing_for

# A training batch, each of its arrays larger than any on-chip memory; and a decoding batch.
BATCH, LENGTH, SEQUENCES = 16, 2048, 128
WAVES_BATCH = 8  # the waves of a GPU's blocks are those of this training batch


@dataclasses.dataclass(frozen=True)
class HloModule:
  run: Callable
  args: tuple
  minimum: int  # bytes: what the pass is given, read once, and what it returns, written once
  tokens: int  # times heads
  donate: tuple[int, ...] = ()


def size_of(*trees) -> int:
  """Bytes of all arrays."""
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(trees))


def _arrays(case):
  dk, dv = case.head_size, case.value_size
  array = lambda *sizes, dtype=jnp.float32: jax.ShapeDtypeStruct((BATCH, *sizes), dtype)
  tokens = lambda d: array(LENGTH, case.heads, d, dtype=jnp.dtype(case.dtype))
  arrays = dict(q=tokens(dk), k=tokens(dk), v=tokens(dv))
  if not case.linear:
    arrays["beta"] = array(LENGTH, case.heads)
  segments = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
  if case.inputs in ("plain", "documents"):
    return arrays, segments if case.inputs == "documents" else None
  arrays["g"] = array(LENGTH, case.heads, *([dk] if case.channels else []))
  if case.inputs == "gates of channels":
    return arrays, None
  arrays["S0"] = array(case.heads, dk, dv)
  return arrays, segments


def _sequence(rule, case):
  """Forward, saving forward or backward of a differentiable rule."""
  arrays, segments = _arrays(case)
  run = lambda x, segments: rule(**x, segment_ids=segments, chunk=case.chunk)
  save = lambda x, segments: jax.vjp(lambda x: run(x, segments), x)

  def save_new(x, segments):
    # Without what was given: jit would copy those residuals, a training step leaves them in place.
    outputs, pull = save(x, segments)
    given = jax.tree.leaves((x, segments))
    return outputs, [y for y in jax.tree.leaves(pull) if not any(y is z for z in given)]

  outputs, pull = jax.eval_shape(save, arrays, segments)
  forward = size_of(arrays, segments, outputs)
  tokens = BATCH * LENGTH * case.heads
  match case.part:
    case "forward":
      return HloModule(run, (arrays, segments), forward, tokens)
    case "saving forward":
      return HloModule(save_new, (arrays, segments), forward, tokens)
    case "backward":
      return HloModule(lambda pull, x: pull(x), (pull, outputs), forward + size_of(arrays), tokens)


def _step(rule, case):
  dk, dv = case.head_size, case.value_size
  array = lambda *sizes, dtype=jnp.float32: jax.ShapeDtypeStruct((SEQUENCES, *sizes), dtype)
  key, value = (array(case.heads, d, dtype=jnp.dtype(case.dtype)) for d in (dk, dv))
  S = array(case.heads, dk, dv)
  gate = None if case.inputs == "plain" else array(case.heads, *([dk] if case.channels else []))
  beta = () if case.linear else (array(case.heads),)
  args = (key, key, value, *beta, S, gate)
  size = size_of(args, value, S)
  return HloModule(rule, args, size, SEQUENCES * case.heads, donate=(3 + len(beta),))


def _ut(case, capability):
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
  minimum, tokens = size_of(args, W, U), BATCH * LENGTH * case.heads
  if case.program != "UT backward":
    return HloModule(transform, args, minimum, tokens)
  backward = functools.partial(pallas.ut_transform_bwd, **options)
  return HloModule(backward, (*args, X, W, U, W, U), minimum + size_of(args[:4]), tokens)


def build(target: str, case: KernelCase) -> HloModule:
  """The program of a case, for jit."""
  from pallas_kernels import delta_rule, linear_attention

  if case.around:
    from experiments.aot import auxiliary_kernels

    return auxiliary_kernels.build(case, CHIPS[target].platform)
  if case.program.startswith("UT"):
    return _ut(case, 10 * CHIPS[target].nvidia.major)
  kernels, name = (
    (linear_attention, "linear_attention") if case.linear else (delta_rule, "delta_rule")
  )
  platform = CHIPS[target].platform
  if case.part == "step":
    return _step(getattr(kernels, f"{name}_step_{platform}"), case)
  return _sequence(getattr(kernels, f"{name}_{platform}"), case)


def measure(target: str, case: KernelCase) -> list[tuple[dict, dict]]:
  """Key and metrics of each kernel of the case; to be called in a Worker for the target."""
  platform, machine = CHIPS[target].platform, targets.one(target)
  try:
    with tracing_for(machine):  # what is kept for a backward depends on it
      program = build(target, case)
    compiled = compile_function(machine, program.run, program.args, program.donate)
  except Exception as error:  # whatever a compiler raises is the result
    return failures(target, case, error)
  moves = Hlo(compiled.hlo).moves()
  moved = {move.kernel: move.kernel_bytes for move in moves if move.kernel}
  total = sum(move.bytes for move in moves)
  rows = []
  for key in keys(target, case):
    kernel = key["kernel"]
    if platform == "tpu":
      found = tpu_resources(compiled, kernel)
      steps = math.prod(compiled.grids[kernel])
      # How often a loop runs is not known here.
      once = found["bundles"] * steps / program.tokens
      found["bundles_per_token_head"] = None if found["loop_bundles"] else once
    else:
      found = gpu_resources(compiled, kernel)
      found |= dict(tile=_tile(machine, case, kernel), waves=_waves(compiled, kernel, found))
    size = moved[kernel if kernel in moved else "triton_kernel_call"]
    metrics = dict(
      compiles=True,
      error=None,
      **found,
      bytes=size,
      minimum_bytes=program.minimum,
      bytes_over_minimum=size / program.minimum,
      program_bytes_over_minimum=total / program.minimum,
      compile_seconds=compiled.lower_seconds.wall + compiled.compile_seconds.wall,
      compile_cpu_seconds=compiled.lower_seconds.cpu + compiled.compile_seconds.cpu,
    )
    rows.append((key, metrics))
  return rows


def _tile(machine, case, kernel):
  """[block_k, block_v, warps, stages] of a GPU's table, None for a kernel that has none.

  Of attention the first two are tokens, of a program and of the other side.
  """
  from pallas_kernels.attention.pallas_gpu import tiles as attention_tiles
  from pallas_kernels.delta_rule.pallas_gpu import tiles

  if case.program.startswith("attention"):
    with tracing_for(machine):
      part = kernel.removeprefix("attention_")
      return list(attention_tiles.tile_for(part, LENGTH, case.head_size))
  name = kernel.removeprefix("delta_rule_").removeprefix("linear_attention_")
  name = {"_ut_kernel": "ut_triton"}.get(kernel, name)
  if name == "step" or case.around:
    return None
  with tracing_for(machine):
    kind = dict(full=case.inputs == "full", delta_rule=not case.linear, channels=case.channels)
    return list(tiles.tile_for(name, _arrays(case)[0]["k"], **kind))


def _waves(compiled, kernel, found):
  """How often a kernel's blocks, WAVES_BATCH rows of them, fill the chip; None for a step."""
  if kernel not in compiled.grids or kernel.endswith("_step"):
    return None
  blocks = math.prod(compiled.grids[kernel]) * WAVES_BATCH / BATCH
  return blocks / (compiled.machine.chip.nvidia.cores * found["blocks_per_core"])


def failures(target: str, case: KernelCase, error: Exception) -> list[tuple[dict, dict]]:
  """The same of a program that did not compile."""
  first = (str(error).strip() or type(error).__name__).splitlines()[0]
  return [(key, dict(compiles=False, error=first)) for key in keys(target, case)]
