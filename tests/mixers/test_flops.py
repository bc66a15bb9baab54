"""`Mixer.flops` equals the FLOPs that XLA counts in the compiled program, exactly."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from deltanet_jax.mixers import MIXERS, mixer_class
from deltanet_jax.mixers.layers import Linear
from deltanet_jax.mixers.matrix_state import DeltaRuleMixer, DPLRMixer, MatrixStateMixer
from deltanet_jax.ops import log_max_scan, selective_scan
from deltanet_jax.ops.triangular import unit_lower_inverse
from experiments.aot.hlo import HloModule, arrays
from tests.support.mixers import CASES, CHUNK, D, make
from tests.support.mutated_mixers import make_mutated, mutated_source


def shape(*dims):
  return jax.ShapeDtypeStruct(dims, jnp.float64)


def compiled(f, *args):
  program = HloModule(jax.jit(f).lower(*args).compile().as_text())
  assert not program.unknown_trip_counts
  return program


def matmul_flops(f, *args):
  """FLOPs of all matmuls in the compiled function."""
  return sum(compiled(f, *args).matmul_flops().values())


def weight_flops(mixer):
  """FLOPs of the matmuls with weights, per token."""
  linears = (x for _, x in nnx.iter_modules(mixer) if isinstance(x, Linear))
  kernels = [x.kernel for x in linears]
  if mixer.cfg.kind == "rwkv6":
    kernels += [mixer.shift_down, mixer.shift_up, mixer.decay_down, mixer.decay_up]
  return 2 * sum(math.prod(x.shape) for x in kernels)


def decay_flops(mixer):
  """FLOPs of the cumulative sums of log decays, two triangular matmuls that `flops` leaves out."""
  channels = {"gated_deltanet": 1, "retnet": 1, "gla": mixer.key_size, "kda": mixer.key_size}
  channels |= {"rwkv7": mixer.key_size, "deltaproduct": getattr(mixer.cfg, "steps", 1)}
  channels |= dict(gated_rfa=1, mamba2=1, mlstm=1, hgrn2=mixer.key_size, rwkv6=mixer.key_size)
  if mixer.cfg.kind == "dfw":
    channels["dfw"] = mixer.key_size + mixer.value_size
  if mixer.cfg.kind in ("abc", "gsa"):
    channels[mixer.cfg.kind] = 2 * mixer.cfg.slots  # in both passes
  return 2 * mixer.heads * 2 * CHUNK * channels.get(mixer.cfg.kind, 0)


def chunkwise_flops(mixer):
  """Return (compiled, declared) FLOPs per token of the chunkwise form, for full chunks."""
  if hasattr(mixer.cfg, "implementation"):
    mixer.cfg = dataclasses.replace(mixer.cfg, implementation="chunkwise")
  length = 4 * CHUNK
  counted = matmul_flops(lambda mixer, x: mixer(x), mixer, shape(1, length, D)) / length
  counted -= weight_flops(mixer) + decay_flops(mixer)
  if isinstance(mixer, DeltaRuleMixer | DPLRMixer):
    # Blocks of up to 16 are inverted by full masked matmuls; see the test below.
    inverse = matmul_flops(unit_lower_inverse, shape(1, CHUNK, CHUNK))
    # One inverse per head, block and step.
    inverses = mixer.heads * getattr(mixer, "blocks", 1) * getattr(mixer.cfg, "steps", 1)
    counted += inverses * (2 * CHUNK**3 / 3 - inverse) / CHUNK
  return counted, mixer.flops(length)


def attention_flops(mixer):
  """The same for attention: every token against a cache that is just long enough."""
  length, window = 8, mixer.cfg.window or 8

  def step(size):
    state = jax.eval_shape(lambda: mixer.init_state(1, size, jnp.float64))
    run = lambda mixer, x, state: mixer.mix(x, None, state)
    return matmul_flops(run, mixer, shape(1, 1, D), state) - weight_flops(mixer)

  per_key = step(2) / 2
  assert step(min(length, window)) == min(length, window) * per_key
  total = sum(min(t, window) for t in range(1, length + 1)) * per_key
  return total / length, mixer.flops(length)


def selective_scan_flops(mixer):
  """The same for Mamba's recurrence; an exponential counts as one operation."""
  d, N = mixer.channels, mixer.cfg.state_size
  tokens, selected = shape(1, 1, d), shape(1, 1, N)
  run = lambda u, dt, A, B, C, D, S0: selective_scan(
    u, dt, A, B, C, D=D, S0=S0, implementation="recurrent"
  )
  args = (tokens, tokens, shape(d, N), selected, selected, shape(d), shape(1, d, N))
  cost = jax.jit(run).lower(*args).compile().cost_analysis()
  return cost["flops"] + cost["transcendentals"], mixer.flops(1)


def log_max_scan_flops(mixer):
  """The same for RWKV-4's recurrence."""
  token, channels = shape(1, 1, mixer.width), shape(mixer.width)
  run = lambda k, v, w, u, S0: log_max_scan(k, v, w, u, S0=S0, implementation="recurrent")
  args = (token, token, channels, channels, shape(1, 3, mixer.width))
  cost = jax.jit(run).lower(*args).compile().cost_analysis()
  return cost["flops"] + cost["transcendentals"], mixer.flops(1)


def long_conv_flops(mixer):
  """The same for long convolutions; an FFT of n real numbers counts as 5/2 n log2 n."""
  length = 256
  program = compiled(lambda mixer, x: mixer(x), mixer, shape(1, length, D))
  counted = sum(n * (4 if dtype == "c128" else 1) for dtype, n in program.matmul_flops().items())
  counted -= length * weight_flops(mixer)
  if hasattr(mixer, "filter"):
    counted -= matmul_flops(lambda mixer: mixer.filter(length, jnp.float64), mixer)
  channels = 0
  for x, _, times in program.executed:
    dims = arrays(x.shape)[0].dims if x.op == "fft" else ()
    if len(dims) > 2:  # not the FFTs of the filters
      (n,) = map(int, re.findall(r"fft_length=\{(\d+)\}", x.rest))
      counted += times * math.prod(dims[:-1]) * 2.5 * n * math.log2(n)
      channels += times * math.prod(dims[:-1]) * n / length / 2
  # Elementwise: products of the spectra; with heads also products with keys and queries, and sums.
  each = 6 if mixer.cfg.kind == "multihead_hyena" else 3
  return counted / length + each * channels, mixer.flops(length)


COUNTS = {
  "rwkv4": log_max_scan_flops,
  "attention": attention_flops,
  "mamba": selective_scan_flops,
  "abc": chunkwise_flops,
  "gsa": chunkwise_flops,
  "s4d": long_conv_flops,
  "hyena": long_conv_flops,
  "multihead_hyena": long_conv_flops,
}


def count(mixer, kind):
  default = chunkwise_flops if issubclass(mixer_class(kind), MatrixStateMixer) else None
  compiled, declared = COUNTS.get(kind, default)(mixer)
  return compiled, pytest.approx(declared, rel=1e-12)


@pytest.mark.parametrize("kind", MIXERS)
def test_declared_flops_equal_those_of_the_compiled_program(kind):
  for name in (name for name, cfg in CASES.items() if cfg.kind == kind):
    compiled, declared = count(nnx.clone(make(name)[0]), kind)
    assert compiled == declared, name


def test_triangular_inverse_takes_two_thirds_of_a_cube():
  # 2 C^3 / 3 FLOPs: recursively, two halves are merged by two matmuls.
  small, large = (matmul_flops(unit_lower_inverse, shape(1, C, C)) for C in (32, 64))
  assert large - 2 * small == 2 * (64**3 - 2 * 32**3) / 3


WRONG_FLOPS = pytest.mark.parametrize(
  ("kind", "old", "new"),
  [
    ("attention", "return 4 * self.heads", "return 2 * self.heads"),
    ("attention", "(keys + 1) / 2", "keys"),
    ("mamba", "7 * self.cfg", "6 * self.cfg"),
  ],
)


@WRONG_FLOPS
def test_mutation_applies_to_the_current_source(kind, old, new):
  compile(mutated_source(kind, old, new), kind, "exec")


@pytest.mark.slow
@WRONG_FLOPS
def test_wrong_flops_are_detected(kind, old, new):
  compiled, declared = count(make_mutated(kind, old, new)[0], kind)
  assert compiled != declared
