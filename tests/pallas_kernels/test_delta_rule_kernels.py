"""Kernels in interpret mode against the float64 recurrence: one body for every backend."""

import dataclasses
import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from deltanet_jax.ops import compiling_for, delta_rule, delta_rule_step
from deltanet_jax.ops.layer_state import LayerState
from deltanet_jax.ops.testing import (
  ILL_CONDITIONED,
  ILL_CONDITIONED_REL_RMS,
  Spec,
  ill_conditioned_inputs,
  rel_rms,
)
from pallas_kernels.delta_rule import delta_rule_gpu, delta_rule_tpu, delta_rule_triton
from pallas_kernels.delta_rule.checks import unsupported_reason
from pallas_kernels.delta_rule.pallas_tpu.tiles import Problem, choose_tile
from tests.support.delta_rule import jax_inputs, reference, value_and_grads
from tests.support.tolerances import assert_close

KERNELS = ("pallas_tpu", "pallas_gpu")
SPEC = Spec(B=1, L=70, H=1, Hv=2, dk=16, dv=32)
# Each feature on and off, length 1, lengths that are and are not multiples of the chunk, both
# dtypes. Interpret mode is slow to compile, so not every combination.
CASES = [
  (dict(L=1), "float32"),
  (dict(L=64), "float32"),
  (dict(gate="scalar", packed=True), "float32"),
  (dict(packed=True), "bfloat16"),
  (dict(gate="scalar"), "bfloat16"),
  (dict(L=33, dk=64, dv=64, Hv=1, max_beta=2.0), "float32"),
  (dict(L=20, dk=200, dv=500, Hv=1), "float32"),
]


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("change,dtype", CASES)
def test_kernel_equals_recurrence(change, dtype, implementation):
  inputs, want = reference(dataclasses.replace(SPEC, **change), dtype, scale=0.3)
  options = dict(implementation=implementation, interpret=True, chunk=32, scale=0.3)
  assert_close(value_and_grads(inputs, dtype, **options), want, dtype)


@functools.cache
def jitted(rule):
  """Return a jitted function for o, S and all gradients, compiled once for all kinds of inputs."""

  @jax.jit
  def run(inputs, do, dS):
    (o, S), pull = jax.vjp(lambda x: rule(**x), inputs)
    (grads,) = pull((do.astype(o.dtype), dS.astype(S.dtype)))
    return dict(o=o, S=S, **{f"d{name}": x for name, x in grads.items()})

  return run


RULES = {
  "tpu": functools.partial(delta_rule_tpu, interpret=True),
  "gpu": functools.partial(delta_rule_gpu, interpret=True),
  "gpu unfused": functools.partial(delta_rule_gpu, interpret=True, fused=False),
}


def largest_errors(rule, kinds, beta=None):
  """Return kind of input -> name and error of its worst output or gradient, over 4096 tokens."""
  truth, worst = functools.partial(delta_rule, implementation="recurrent"), {}
  for kind in kinds:
    inputs = {name: x.astype(np.float32) for name, x in ill_conditioned_inputs(kind).items()}
    if beta is not None:
      inputs["beta"][:] = beta
    rng = np.random.default_rng(1)
    do, dS = (rng.standard_normal(inputs[name].shape) for name in ("v", "S0"))
    wide = {name: x.astype(np.float64) for name, x in inputs.items()}
    got, want = jitted(rule)(inputs, do, dS), jitted(truth)(wide, do, dS)
    errors = {name: rel_rms(got[name], want[name]) for name in want}
    # NaN counts as the largest error.
    name = max(errors, key=lambda name: np.nan_to_num(errors[name], nan=np.inf))
    worst[kind] = name, errors[name]
  return worst


@pytest.mark.parametrize("backend", RULES)
def test_ill_conditioned_inputs(backend):
  worst = largest_errors(RULES[backend], ILL_CONDITIONED)
  assert all(error <= ILL_CONDITIONED_REL_RMS["float32"] for _, error in worst.values()), worst


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tpu", "gpu"])
def test_repeated_keys_with_beta_2(backend):
  """Beta 2 with repeated keys: nothing decays, and the float32 recurrence has an error of 2e-5."""
  worst = largest_errors(RULES[backend], ("alternating", "period_8", "nearly_identical"), 2.0)
  assert all(error <= 3e-5 for _, error in worst.values()), worst


@pytest.mark.slow
def test_ill_conditioned_inputs_with_per_channel_gates():
  """Gates of 1. Equal keys with beta 2 are excluded: without decay they need the exact K K^T."""

  def rule(**inputs):
    return RULES["gpu"](**inputs, g=jnp.zeros_like(inputs["k"]))

  worst = largest_errors(rule, [kind for kind in ILL_CONDITIONED if kind != "identical_beta_2"])
  assert all(error <= ILL_CONDITIONED_REL_RMS["float32"] for _, error in worst.values()), worst


@pytest.mark.parametrize("change", [dict(B=4, Hv=1), dict(B=6, gate="scalar", packed=True)])
def test_tpu_programs_of_several_sequences(change):
  """With few heads; each sequence has its own state, segments and decays."""
  inputs, want = reference(dataclasses.replace(SPEC, L=40, **change), "float32")
  options = dict(implementation="pallas_tpu", interpret=True, chunk=16)
  assert_close(value_and_grads(inputs, "float32", **options), want, "float32")


def test_tpu_tiles_have_as_many_states_as_fit():
  def tile(B, H, d=128, dtype="bfloat16", Hv=None):
    inputs = dict(delta_rule=True, gate="none", packed=False)
    problem = Problem(B, 2048, H, Hv or H, d, d, jnp.dtype(dtype), **inputs)
    tile = choose_tile(problem, scale=1.0, chunk=None, inverse_precision=None)
    assert B % tile.sequences == 0 and (Hv or H) % tile.heads == 0
    return tile.sequences, tile.heads

  assert [tile(16, H) for H in (1, 2, 4, 8, 11, 12, 16)] == [
    (8, 1), (4, 2), (2, 4), (1, 8), (8, 1), (2, 4), (1, 8),
  ]  # fmt: skip
  assert tile(3, 1) == (3, 1) and tile(1, 1) == (1, 1) and tile(1, 11) == (1, 11)
  assert tile(16, 4, dtype="float32") == (1, 4) and tile(16, 1, d=256) == (4, 1)
  assert tile(16, 1, d=64) == (8, 1) and tile(16, 2, Hv=4) == (2, 4)


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_steep_decays(dtype, implementation):
  """Log decays of 0 to -20 and resets of -1e4: tokens after a reset are as accurate as others."""
  spec = dataclasses.replace(SPEC, L=200, Hv=1, gate="scalar")
  inputs, _ = reference(spec, dtype)
  rng = np.random.default_rng(0)
  steep = rng.choice([-0.01, -1.0, -20.0, -1e4], p=[0.6, 0.25, 0.1, 0.05], size=inputs["g"].shape)
  inputs = inputs | dict(g=steep.astype(np.float32))
  options = dict(implementation=implementation, interpret=True)
  want = value_and_grads(inputs, "float64", implementation="recurrent")
  assert_close(value_and_grads(inputs, dtype, **options), want, dtype)


def test_tpu_interpreter_with_memory_model():
  """`InterpretParams` simulates the memories and copies of a TPU; `True` only runs the body."""
  inputs = jax_inputs(dataclasses.replace(SPEC, L=40, packed=True), dtype="float32")
  plain, simulated = (
    delta_rule_tpu(**inputs, chunk=16, interpret=interpret)
    for interpret in (True, pltpu.InterpretParams())
  )
  for x, y in zip(plain, simulated):
    np.testing.assert_array_equal(x, y)


def test_unfused_gpu_design():
  inputs, want = reference(dataclasses.replace(SPEC, gate="scalar", packed=True), "float32")
  narrow = {n: jnp.asarray(x, None if n == "segment_ids" else "float32") for n, x in inputs.items()}
  o, S = jax.jit(lambda x: delta_rule_gpu(**x, fused=False, chunk=32, interpret=True))(narrow)
  assert rel_rms(o, want["o"]) < 2e-6 and rel_rms(S, want["S"]) < 2e-6


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("gate", ["none", "scalar", "vector"])
def test_decoding_step(gate, implementation):
  x = jax_inputs(Spec(B=2, L=1, H=2, Hv=4, dk=16, dv=32, gate=gate), dtype="float32")
  token = [x[n][:, 0] for n in ("q", "k", "v", "beta")]
  g_t = None if gate == "none" else x["g"][:, 0]
  step = lambda **kw: delta_rule_step(*token, x["S0"], g_t, scale=0.3, **kw)
  got = step(implementation=implementation, interpret=True)
  for y, want in zip(got, step(implementation="recurrent")):
    assert rel_rms(y, want) < 1e-6


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("dk", [16, 24])
def test_decoding_step_in_a_stack_of_states(dk, implementation):
  """The state of the layer is updated, those of other layers are bitwise unchanged."""
  x = jax_inputs(Spec(B=2, L=1, H=2, dk=dk, dv=32), dtype="float32")
  token = [x[n][:, 0] for n in ("q", "k", "v", "beta")]
  stack = jnp.stack([x["S0"] + 1, x["S0"], x["S0"] - 1])
  kernel = dict(implementation=implementation, interpret=True)
  got, slot = jax.jit(lambda S: delta_rule_step(*token, LayerState(S, jnp.int32(1)), **kernel))(
    stack
  )
  want, S = delta_rule_step(*token, x["S0"], implementation="recurrent")
  assert rel_rms(got, want) < 1e-6 and rel_rms(slot.stack[1], S) < 1e-6
  np.testing.assert_array_equal(slot.stack[::2], stack[::2])


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_per_channel_gates(dtype, implementation):
  """Blocks of all sizes up to 32 tokens; some log decays are far below the clamp."""
  spec = dataclasses.replace(SPEC, L=40, gate="vector", packed=dtype == "float32")
  inputs, _ = reference(spec, dtype)
  reset = np.random.default_rng(0).random(inputs["g"].shape) < 0.1
  inputs = inputs | dict(g=np.where(reset, -1e3, inputs["g"]))
  want = value_and_grads(inputs, "float64", implementation="recurrent")
  options = dict(implementation=implementation, interpret=True, chunk=32)
  assert_close(value_and_grads(inputs, dtype, **options), want, dtype)


@pytest.mark.parametrize("rule", [delta_rule_triton, RULES["gpu unfused"]], ids=["triton", "gpu"])
def test_ut_transform_rejects_per_channel_gates(rule):
  inputs = jax_inputs(dataclasses.replace(SPEC, gate="vector"), dtype="float32")
  with pytest.raises(ValueError, match="one gate per value head"):
    rule(**inputs)


@pytest.mark.parametrize("implementation", KERNELS)
def test_too_large_heads_raise(implementation):
  inputs = jax_inputs(dataclasses.replace(SPEC, L=2, dv=513), dtype="float32")
  with pytest.raises(ValueError, match="values of up to 512 channels, got 16 and 513"):
    delta_rule(**inputs, implementation=implementation, interpret=True)


def test_unsupported_reason_of_sequences_and_steps():
  """One reason per cause; None for supported inputs."""
  tokens = jax_inputs(dataclasses.replace(SPEC, L=2, gate="scalar"), dtype="float32")
  S0, _ = tokens.pop("S0"), tokens.pop("segment_ids", None)
  for inputs in (tokens, {n: x[:, 0] for n, x in tokens.items()}):
    why = lambda **change: unsupported_reason(**(dict(inputs, S0=S0) | change))
    wide = lambda name, size: jnp.zeros((*inputs[name].shape[:-1], size), jnp.float32)
    assert why() is None and why(g=None, S0=None) is None
    assert all(x is None for x in (why(k=wide("k", 256)), why(v=wide("v", 512))))
    for change, words in (
      (dict(k=wide("k", 257)), "keys of up to 256"),
      (dict(v=wide("v", 513)), "got 16 and 513"),
      (dict(v=inputs["v"].astype("bfloat16")), "one dtype"),
      ({n: inputs[n].astype("float16") for n in "qkv"}, "float16"),
      ({n: inputs[n].astype("float64") for n in "qkv"}, "float64"),
      (dict(g=inputs["g"][..., None]), "one gate per value head"),
      (dict(S0=S0.astype("float64")), "float64 S0"),
      (dict(beta=inputs["beta"].astype("float64")), "float64 beta"),
    ):
      assert words in why(**change), change


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("implementation", [*KERNELS, "triton"])
def test_unsupported_dtypes_raise(implementation, dtype):
  inputs = jax_inputs(dataclasses.replace(SPEC, L=2), dtype=dtype)
  with pytest.raises(ValueError, match=f"bfloat16 or float32, got {dtype}"):
    delta_rule(**inputs, implementation=implementation)


@pytest.mark.parametrize("rule", [delta_rule_tpu, delta_rule_gpu, delta_rule_triton])
def test_unknown_precision_raises(rule):
  inputs = jax_inputs(dataclasses.replace(SPEC, L=2), dtype="float32")
  with pytest.raises(
    ValueError, match="'tf32', expected one of bf16, bf16x3, bf16x6, substitution"
  ):
    rule(**inputs, inverse_precision="tf32")


TOKENS = dict(q=(1, 2, 1, 16), k=(1, 2, 1, 16), v=(1, 2, 1, 16), beta=(1, 2, 1))


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("implementation", KERNELS)
def test_kernel_compiled_for_a_cpu_raises(implementation, jit):
  inputs = {name: jnp.ones(shape, "float32") for name, shape in TOKENS.items()}
  token = {f"{name}_t": x[:, 0] for name, x in inputs.items()} | dict(S=jnp.zeros((1, 1, 16, 16)))
  token["S"] = token["S"].astype("float32")
  for run, arguments in ((delta_rule, inputs), (delta_rule_step, token)):
    run = functools.partial(run, implementation=implementation)
    with pytest.raises(ValueError, match=r"compiled for a CPU. Use an implementation in plain JAX"):
      jit(run)(**arguments)


@pytest.mark.parametrize("implementation", KERNELS)
def test_forward_mode_raises(implementation):
  inputs = {name: jnp.ones(shape, "float32") for name, shape in TOKENS.items()}
  f = functools.partial(delta_rule, implementation=implementation, interpret=True)
  with pytest.raises(TypeError, match=r'forward-mode.* implementation="recurrent"'):
    jax.jvp(lambda x: f(**x), (inputs,), (inputs,))


def test_checks_do_not_import_pallas():
  """`unsupported_reason` is available without the import time of Pallas and Triton."""
  code = "import sys, pallas_kernels.delta_rule.checks; print(*sys.modules)"
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  heavy = {"jax.experimental.pallas", "triton", "jax_triton"}
  assert not heavy & set(done.stdout.split())


@pytest.mark.parametrize("precision,limit", [("bf16", 2e-2), ("bf16x3", 2e-5), ("bf16x6", 2e-6)])
def test_inverse_precision_bounds_the_error(precision, limit):
  inputs, want = reference(Spec(L=64, H=1, dk=32), "float32")
  narrow = {n: jnp.asarray(x, "float32") for n, x in inputs.items()}
  errors = []
  for kernel in (delta_rule_tpu, delta_rule_gpu):
    run = functools.partial(kernel, **narrow, chunk=64, interpret=True)
    o, _ = run(inverse_precision=precision)
    errors.append(rel_rms(o, want["o"]))
    if precision == "bf16":
      # The Newton step corrects most of the error: only last digits show that bf16 was used.
      assert not np.array_equal(o, run(inverse_precision="bf16x6")[0])
  assert max(errors) < limit, errors


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("kind", ["nearly identical", "beta up to 2"])
def test_bfloat16_error_is_not_limited_by_R(kind, implementation):
  """R and Y have two bfloat16 parts, so their rounding does not dominate the error of o and S."""
  L, d = 256, 64
  rng = np.random.default_rng(0)
  unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
  inputs = dict(zip("qkv", rng.standard_normal((3, 1, L, 1, d))), beta=rng.uniform(0, 2, (1, L, 1)))
  inputs |= dict(q=unit(inputs["q"]), k=unit(inputs["k"]))
  if kind == "nearly identical":
    inputs["k"] = unit(inputs["k"][:, :1] + 1e-3 * rng.standard_normal(inputs["k"].shape))
    inputs["beta"] = np.ones_like(inputs["beta"])
  inputs = {name: jnp.asarray(x, "bfloat16") for name, x in inputs.items()}
  wide = {name: x.astype("float64") for name, x in inputs.items()}
  want = delta_rule(**wide, implementation="recurrent")
  got = delta_rule(**inputs, implementation=implementation, interpret=True)
  errors = {name: rel_rms(x, y) for name, x, y in zip("oS", got, want)}
  limits = dict(S=1e-2) if kind == "nearly identical" else dict(o=6e-3, S=6e-3)
  assert all(errors[name] <= limit for name, limit in limits.items()), errors


@pytest.mark.parametrize(
  "platform,call", [("cpu", None), ("gpu", "triton"), ("tpu", "tpu_custom_call")]
)
def test_each_platform_lowers_its_default(platform, call):
  inputs = jax_inputs(dataclasses.replace(SPEC, packed=True, gate="scalar"), dtype="float32")
  with compiling_for(platform):
    traced = jax.jit(lambda x: delta_rule(**x)).trace(inputs)
    name = {"gpu": "cuda"}.get(platform, platform)
    text = traced.lower(lowering_platforms=(name,)).as_text()
  for name in ("triton", "tpu_custom_call"):
    assert (name in text) == (name == call), name
