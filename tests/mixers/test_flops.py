"""What a mixer says it costs is what the compiler counts, to the last operation."""

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


def products(f, *args):
  """Operations of all products of a compiled function."""
  return sum(compiled(f, *args).matmul_flops().values())


def weights(mixer):
  """Of the products with weights, per token."""
  found = (x for _, x in nnx.iter_modules(mixer) if isinstance(x, Linear))
  found = [x.kernel for x in found]
  if mixer.cfg.kind == "rwkv6":
    found += [mixer.shift_down, mixer.shift_up, mixer.decay_down, mixer.decay_up]
  return 2 * sum(math.prod(x.shape) for x in found)


def gate_sums(mixer):
  """Log decays are summed by two products with a triangle, which is no work of the recurrence."""
  channels = {"gated_deltanet": 1, "retnet": 1, "gla": mixer.key_size, "kda": mixer.key_size}
  channels |= {"rwkv7": mixer.key_size, "deltaproduct": getattr(mixer.cfg, "steps", 1)}
  channels |= dict(gated_rfa=1, mamba2=1, mlstm=1, hgrn2=mixer.key_size, rwkv6=mixer.key_size)
  if mixer.cfg.kind == "dfw":
    channels["dfw"] = mixer.key_size + mixer.value_size
  if mixer.cfg.kind in ("abc", "gsa"):
    channels[mixer.cfg.kind] = 2 * mixer.cfg.slots  # in both passes
  return 2 * mixer.heads * 2 * CHUNK * channels.get(mixer.cfg.kind, 0)


def of_chunks(mixer):
  """(counted, said) per token of the chunkwise form, over whole chunks."""
  if hasattr(mixer.cfg, "implementation"):
    mixer.cfg = dataclasses.replace(mixer.cfg, implementation="chunkwise")
  length = 4 * CHUNK
  counted = products(lambda mixer, x: mixer(x), mixer, shape(1, length, D)) / length
  counted -= weights(mixer) + gate_sums(mixer)
  if isinstance(mixer, DeltaRuleMixer | DPLRMixer):
    # The inverse of blocks up to 16 is by whole products under masks; see the test below.
    inverse = products(unit_lower_inverse, shape(1, CHUNK, CHUNK))
    # Inverses per token: each head's, of all its blocks and steps.
    inverses = mixer.heads * getattr(mixer, "blocks", 1) * getattr(mixer.cfg, "steps", 1)
    counted += inverses * (2 * CHUNK**3 / 3 - inverse) / CHUNK
  return counted, mixer.flops(length)


def of_cache(mixer):
  """The same of attention: every token against a cache just long enough for it."""
  length, window = 8, mixer.cfg.window or 8

  def step(size):
    state = jax.eval_shape(lambda: mixer.init_state(1, size, jnp.float64))
    run = lambda mixer, x, state: mixer.mix(x, None, state)
    return products(run, mixer, shape(1, 1, D), state) - weights(mixer)

  per_key = step(2) / 2
  assert step(min(length, window)) == min(length, window) * per_key
  total = sum(min(t, window) for t in range(1, length + 1)) * per_key
  return total / length, mixer.flops(length)


def of_scan(mixer):
  """The same of Mamba's recurrence; each exponential counts as one operation."""
  d, N = mixer.channels, mixer.cfg.state_size
  tokens, selected = shape(1, 1, d), shape(1, 1, N)
  run = lambda u, dt, A, B, C, D, S0: selective_scan(
    u, dt, A, B, C, D=D, S0=S0, implementation="recurrent"
  )
  args = (tokens, tokens, shape(d, N), selected, selected, shape(d), shape(1, d, N))
  cost = jax.jit(run).lower(*args).compile().cost_analysis()
  return cost["flops"] + cost["transcendentals"], mixer.flops(1)


def of_averages(mixer):
  """The same of RWKV-4's recurrence."""
  token, channels = shape(1, 1, mixer.width), shape(mixer.width)
  run = lambda k, v, w, u, S0: log_max_scan(k, v, w, u, S0=S0, implementation="recurrent")
  args = (token, token, channels, channels, shape(1, 3, mixer.width))
  cost = jax.jit(run).lower(*args).compile().cost_analysis()
  return cost["flops"] + cost["transcendentals"], mixer.flops(1)


def of_long_conv(mixer):
  """The same of long convolutions: a transform of n numbers takes 5/2 n log2 n operations."""
  length = 256
  program = compiled(lambda mixer, x: mixer(x), mixer, shape(1, length, D))
  counted = sum(n * (4 if dtype == "c128" else 1) for dtype, n in program.matmul_flops().items())
  counted -= length * weights(mixer)
  if hasattr(mixer, "filter"):
    counted -= products(lambda mixer: mixer.filter(length, jnp.float64), mixer)
  channels = 0
  for x, _, times in program.executed:
    dims = arrays(x.shape)[0].dims if x.op == "fft" else ()
    if len(dims) > 2:  # not those of the filters
      (n,) = map(int, re.findall(r"fft_length=\{(\d+)\}", x.rest))
      counted += times * math.prod(dims[:-1]) * 2.5 * n * math.log2(n)
      channels += times * math.prod(dims[:-1]) * n / length / 2
  # Beside these: products of the spectra, and with keys, of queries, and their sum.
  each = 6 if mixer.cfg.kind == "multihead_hyena" else 3
  return counted / length + each * channels, mixer.flops(length)


COUNTS = {
  "rwkv4": of_averages,
  "attention": of_cache,
  "mamba": of_scan,
  "abc": of_chunks,
  "gsa": of_chunks,
  "s4d": of_long_conv,
  "hyena": of_long_conv,
  "multihead_hyena": of_long_conv,
}


def count(mixer, kind):
  by_default = of_chunks if issubclass(mixer_class(kind), MatrixStateMixer) else None
  counted, said = COUNTS.get(kind, by_default)(mixer)
  return counted, pytest.approx(said, rel=1e-12)


@pytest.mark.parametrize("kind", MIXERS)
def test_says_what_the_compiler_counts(kind):
  for name in (name for name, cfg in CASES.items() if cfg.kind == kind):
    counted, said = count(nnx.clone(make(name)[0]), kind)
    assert counted == said, name


def test_an_inverse_is_a_third_of_a_cube():
  # 2 C^3 / 3 operations are what merging halves by two products takes, level upon level.
  small, large = (products(unit_lower_inverse, shape(1, C, C)) for C in (32, 64))
  assert large - 2 * small == 2 * (64**3 - 2 * 32**3) / 3


WRONG_COSTS = pytest.mark.parametrize(
  ("kind", "old", "new"),
  [
    ("attention", "return 4 * self.heads", "return 2 * self.heads"),
    ("attention", "(keys + 1) / 2", "keys"),
    ("mamba", "7 * self.cfg", "6 * self.cfg"),
  ],
)


@WRONG_COSTS
def test_mutation_applies_to_the_current_source(kind, old, new):
  compile(mutated_source(kind, old, new), kind, "exec")


@pytest.mark.slow
@WRONG_COSTS
def test_a_wrong_cost_is_noticed(kind, old, new):
  counted, said = count(make_mutated(kind, old, new)[0], kind)
  assert counted != said
