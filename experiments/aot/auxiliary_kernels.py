"""Programs of the kernels around the rule: convolutions, norms, attention, rotary positions."""

import jax
import jax.numpy as jnp

from deltanet_jax.ops import causal_attention, head_norm, rope, short_conv, short_convs
from deltanet_jax.ops.epilogue import Epilogue
from experiments.aot import kernel_programs


def build(case, platform: str):
  """The program of a case, for jit; "full" inputs have documents, of a norm a gate."""
  rows, length = kernel_programs.BATCH, kernel_programs.LENGTH
  segments = None
  if case.inputs == "full":
    segments = jax.ShapeDtypeStruct((rows, length), jnp.int32)
  shape = (rows, length, case.heads, case.head_size)
  x = jax.ShapeDtypeStruct(shape, jnp.dtype(case.dtype))
  how = dict(implementation=f"pallas_{platform}")
  if case.program.startswith("short conv"):
    width = case.heads * case.head_size
    x, taps = x.update(shape=(rows, length, width)), jax.ShapeDtypeStruct((4, width), jnp.float32)
    epilogue = Epilogue("silu", "l2", case.head_size)
    run = lambda x, taps: (
      lambda ids: short_conv(x, taps, segment_ids=ids, epilogue=epilogue, **how)[0]
    )
    return _program(case, run, (x, taps), segments, x)
  if case.program.startswith("joint conv"):
    sizes = [case.head_size, case.head_size, case.value_size]
    widths = [case.heads * size for size in sizes]
    taps = [jax.ShapeDtypeStruct((4, width), jnp.float32) for width in widths]
    epilogues = [Epilogue("silu", norm, size) for norm, size in zip(("l2", "l2", None), sizes)]
    out = [x.update(shape=(rows, length, width)) for width in (*widths, case.heads)]
    x = x.update(shape=(rows, length, sum(y.shape[2] for y in out)))
    run = lambda x, *taps: lambda ids: short_convs(x, taps, epilogues, segment_ids=ids)
    return _program(case, run, (x, *taps), segments, out)
  if case.program.startswith("head norm"):
    x = x.update(shape=(rows, length, case.heads * case.head_size))
    scale = jax.ShapeDtypeStruct((case.head_size,), jnp.float32)
    gate = [x] if case.inputs == "full" else []
    norm = lambda x, scale, gate=None: head_norm(
      x, scale, 1e-6, gate=gate, gate_activation=jax.nn.silu, **how
    )
    return _program(case, lambda *args: lambda _: norm(*args), (x, scale, *gate), None, x)
  if case.program.startswith("attention"):
    run = lambda *qkv: lambda ids: causal_attention(*qkv, segment_ids=ids, **how)
    return _program(case, run, (x, x, x), segments, x)
  positions = jax.ShapeDtypeStruct((rows, length), jnp.int32)
  run = lambda x: lambda positions: rope(x, positions, **how)
  return _program(case, run, (x,), positions, x)


def _program(case, run, arrays, ids, out):
  """Forward or backward of run(*arrays)(ids), which gives `out`."""
  size = kernel_programs.size_of
  tokens = kernel_programs.BATCH * kernel_programs.LENGTH * case.heads
  minimum = size(arrays, ids, out)
  if not case.program.endswith("backward"):
    forward = lambda arrays, ids: run(*arrays)(ids)
    return kernel_programs.KernelProgram(forward, (arrays, ids), minimum, tokens)
  pull = lambda arrays, ids, d: jax.vjp(lambda *x: run(*x)(ids), *arrays)[1](d)
  return kernel_programs.KernelProgram(pull, (arrays, ids, out), minimum + size(arrays), tokens)
