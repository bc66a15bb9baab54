"""The delta rule against its float64 recurrence: values and every gradient."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltanet_jax.ops import (
  delta_rule,
  delta_rule_attention,
  delta_rule_step,
  ut_transform,
  wy_representation,
)
from deltanet_jax.ops.delta_rule.chunkwise import chunkwise
from deltanet_jax.ops.delta_rule.recurrent import recurrent
from deltanet_jax.ops.delta_rule.reference import recurrent as definition
from deltanet_jax.ops.dispatch import compiling_for
from deltanet_jax.ops.segments import number_segments
from deltanet_jax.ops.testing import (
  ILL_CONDITIONED,
  REL_RMS,
  Spec,
  cast,
  ill_conditioned_inputs,
  rel_rms,
)
from tests.support.delta_rule import jax_inputs, reference, value_and_grads
from tests.support.tolerances import assert_close

GATES = ("none", "scalar", "vector")
# Every length and chunk size, packed and not, with each gate; `test_full_grid` has all of them.
GRID = [
  (1, 64, False),
  (2, 16, True),
  (63, 32, False),
  (63, 64, True),
  (64, 64, False),
  (65, 64, True),
  (65, 16, False),
  (130, 32, True),
  (130, 128, False),
  (1000, 32, False),
  (1000, 64, True),
]
SPEC = Spec(B=2, L=130, H=2, Hv=4, dk=32, dv=48)


def spec_of(L, gate, packed):
  return dataclasses.replace(SPEC, L=L, gate=gate, packed=packed)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(
  "L,chunk,packed,dtype",
  [(*x, "float64") for x in GRID] + [(*x, "float32") for x in GRID if x[0] in (2, 65, 1000)],
)
def test_chunkwise_equals_recurrence(L, chunk, packed, gate, dtype):
  inputs, want = reference(spec_of(L, gate, packed), scale=0.3)
  got = value_and_grads(inputs, dtype, chunk=chunk, scale=0.3, implementation="chunkwise")
  assert_close(got, want, dtype)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("packed", [False, True])
def test_fast_recurrence_equals_the_definition(gate, packed):
  inputs = jax_inputs(dataclasses.replace(spec_of(20, gate, packed), Hv=2))
  segment_ids = inputs.pop("segment_ids", None)
  segments = None if segment_ids is None else number_segments(segment_ids)
  cotangents = jax_inputs(dataclasses.replace(spec_of(20, gate, packed), Hv=2), seed=1)
  names = [name for name in ("q", "k", "v", "beta", "g", "S0") if name in inputs]

  def outputs(recurrence):
    f = lambda x: recurrence(*(x.get(n) for n in ("q", "k", "v", "beta", "g", "S0")), segments)
    values, pull = jax.vjp(f, inputs)
    (grads,) = pull((cotangents["v"], cotangents["S0"]))
    return [*values, *(grads[name] for name in names)]

  for got, want in zip(outputs(recurrent), outputs(definition), strict=True):
    assert rel_rms(got, want) < 1e-12


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_default_without_gradients_may_scan_over_tokens(dtype):
  """Without gradients the fastest form runs, here the token scan; with gradients always chunks."""
  inputs = cast(jax_inputs(spec_of(37, "none", False)), dtype)
  names = ("q", "k", "v", "beta")
  f = lambda x: delta_rule(**x, scale=0.5)
  chunks = lambda x: delta_rule(**x, scale=0.5, implementation="chunkwise")
  limit = REL_RMS[dtype][0]
  for got, want in zip(jax.jit(f)(inputs), jax.jit(chunks)(inputs), strict=True):
    assert got.dtype == want.dtype and rel_rms(got, want) < limit
  with_gradient = jax.make_jaxpr(lambda x: jax.vjp(f, x)[0])(inputs)
  assert "length=37" in str(jax.make_jaxpr(f)(inputs))
  assert "length=37" not in str(with_gradient)
  with compiling_for("gpu"):
    free = dict(scale=1.0, chunk=None, primal="fastest")
    run = lambda x: chunkwise(*(x[n] for n in names), None, inputs["S0"], None, **free)
    assert "length=37" not in str(jax.make_jaxpr(run)(inputs))


@pytest.mark.parametrize("B,H,Hv", [(1, 6, 6), (3, 2, 4), (5, 1, 1), (2, 1, 8)])
def test_head_groups(B, H, Hv):
  """More heads than fit in one block, in numbers that divide evenly or not."""
  inputs, want = reference(Spec(B=B, L=70, H=H, Hv=Hv, dk=8, dv=96, gate="scalar", packed=True))
  assert_close(value_and_grads(inputs, "float64", chunk=16), want, "float64")


@pytest.mark.slow
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(
  "L,chunk,packed",
  list(itertools.product((1, 2, 63, 64, 65, 130, 1000), (16, 32, 64, 128), (False, True))),
)
def test_full_grid(L, chunk, packed, gate):
  for dtype in ("float64", "float32"):
    test_chunkwise_equals_recurrence(L, chunk, packed, gate, dtype)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("packed", [False, True])
def test_bfloat16_inputs(gate, packed):
  inputs, want = reference(spec_of(130, gate, packed), "bfloat16")
  assert_close(value_and_grads(inputs, "bfloat16"), want, "bfloat16")


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("packed", [False, True])
def test_parallel_equals_recurrence(gate, packed, dtype):
  inputs, want = reference(spec_of(65, gate, packed))
  assert_close(value_and_grads(inputs, dtype, implementation="parallel"), want, dtype)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("packed", [False, True])
def test_attention_matrix_times_v_is_o(gate, packed):
  inputs = jax_inputs(spec_of(65, gate, packed))
  del inputs["S0"]
  v = inputs.pop("v")
  A = jax.jit(lambda x: delta_rule_attention(**x, scale=0.3))(inputs)
  want, _ = delta_rule(v=v, **inputs, scale=0.3, implementation="recurrent")
  assert rel_rms(jnp.einsum("bhij,bjhd->bihd", A, v), want) < 1e-12
  np.testing.assert_array_equal(jnp.triu(A, 1), 0)


@pytest.mark.parametrize("max_beta", [1.0, 2.0])
def test_wy_recursion_equals_ut_transform(max_beta):
  inputs = jax_inputs(Spec(L=64, H=1, dk=32, dv=48, max_beta=max_beta))
  K, V, beta = (inputs[name][0, :, 0] for name in ("k", "v", "beta"))
  W, U = wy_representation(K, V, beta)
  T, W_ut, U_ut = ut_transform(K, V, beta)
  assert rel_rms(W_ut, W) < 1e-12 and rel_rms(U_ut, U) < 1e-12
  np.testing.assert_array_equal(jnp.triu(T, 1), 0)
  # Both represent the chunk: the product of the Householder-like factors, and the state.
  product = np.eye(32)
  for k_t, beta_t in zip(np.asarray(K), np.asarray(beta)):
    product = (np.eye(32) - beta_t * np.outer(k_t, k_t)) @ product
  assert rel_rms(np.eye(32) - K.T @ W, product) < 1e-12
  S0 = inputs["S0"][0, 0]
  _, S = delta_rule(**inputs, implementation="recurrent")
  assert rel_rms(S0 + K.T @ (U - W @ S0), S[0, 0]) < 1e-12


@pytest.mark.parametrize("kind", ILL_CONDITIONED)
def test_ill_conditioned_inputs(kind):
  inputs = {
    name: x.astype(np.float32).astype(np.float64)
    for name, x in ill_conditioned_inputs(kind).items()
  }
  want = value_and_grads(inputs, "float64", implementation="recurrent")
  got = value_and_grads(inputs, "float32", implementation="chunkwise")
  errors = {name: rel_rms(got[name], want[name]) for name in want}
  assert all(np.isfinite(x).all() for x in got.values())
  assert all(error <= 1e-5 for error in errors.values()), errors


def golden_value_and_grads(golden, tokens, state, dtype="float32", **options):
  """o, S and gradients of one golden sequence; its operator normalizes q and k itself."""
  take = lambda name: jnp.asarray(golden[name][:, tokens], dtype)
  arrays = {name: take(name) for name in ("q", "k", "v", "beta", "g") if name in golden}
  arrays["S0"] = jnp.asarray(golden["h0"][state : state + 1])
  # The gated file has no scale: its README documents dk**-0.5.
  scale = float(golden["scale"]) if "scale" in golden else arrays["q"].shape[-1] ** -0.5
  l2 = bool(golden.get("l2", True))

  def run(x):
    norm = lambda x: x / jnp.sqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)
    q, k = (norm(x[name]) if l2 else x[name] for name in "qk")
    return delta_rule(q, k, x["v"], x["beta"], g=x.get("g"), S0=x["S0"], scale=scale, **options)

  (o, S), pull = jax.vjp(jax.jit(run), arrays)
  (grads,) = pull((take("do").astype(o.dtype), jnp.asarray(golden["dht"][state : state + 1])))
  return dict(o=o, ht=S, **{{"S0": "dh0"}.get(n, f"d{n}"): x for n, x in grads.items()})


@pytest.mark.parametrize("implementation", ["recurrent", "chunkwise", "parallel"])
@pytest.mark.parametrize(
  "name,prefix,limit",
  [
    ("f32_T65_h0", "naive_", 2e-6),
    ("f32_T130_KneV", "naive_", 2e-6),
    ("bf16_T130_KneV", "naive_", 1.2e-2),
    ("gdn_f32_T65", "fla_naive_", 2e-6),
    ("f32_varlen", "naive_", 2e-6),
  ],
)
def test_golden_files_of_flash_linear_attention(name, prefix, limit, implementation):
  golden = dict(np.load(f"{__file__.rsplit('/', 2)[0]}/golden/{name}.npz"))
  dtype = "bfloat16" if name.startswith("bf16") else "float32"
  # A packed file has one initial state per segment, so its segments are run one by one here;
  # that packed equals separate is `test_packed_equals_separate`.
  bounds = golden.get("cu_seqlens", [0, golden["q"].shape[1]])
  for state, (start, end) in enumerate(itertools.pairwise(bounds)):
    tokens = slice(int(start), int(end))
    got = golden_value_and_grads(golden, tokens, state, dtype, implementation=implementation)
    for key, x in got.items():
      want = golden[prefix + key]
      want = want[state : state + 1] if key in ("ht", "dh0") else want[:, tokens]
      assert rel_rms(x, want) < limit, key


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("implementation", ["recurrent", "chunkwise"])
def test_packed_equals_separate(gate, implementation):
  lengths = (1, 5, 16, 1, 1, 40, 5, 16)
  inputs = jax_inputs(spec_of(sum(lengths), gate, False))
  # Ids that recur, as from a data pipeline, are new segments.
  segment_ids = np.repeat(np.arange(len(lengths)) % 2, lengths)
  inputs["segment_ids"] = jnp.asarray(np.broadcast_to(segment_ids, (2, sum(lengths))))
  options = dict(chunk=16, implementation=implementation)
  packed = value_and_grads(inputs, "float64", **options)
  del inputs["segment_ids"]
  rng = np.random.default_rng(1)
  do = rng.standard_normal(inputs["v"].shape)
  dS = rng.standard_normal(packed["S"].shape)
  run = jax.jit(lambda x: delta_rule(**x, **options))
  start = 0
  for number, length in enumerate(lengths):
    tokens = slice(start, start + length)
    part = {n: x if n == "S0" else x[:, tokens] for n, x in inputs.items()}
    part["S0"] = part["S0"] * float(number == 0)
    (o, S), pull = jax.vjp(run, part)
    last = number == len(lengths) - 1
    (grads,) = pull((do[:, tokens], dS * float(last)))
    assert rel_rms(packed["o"][:, tokens], o) < 1e-12
    for name in part.keys() - {"S0"}:
      # Absolute: dg of a single-token segment after the first is zero.
      got = packed[f"d{name}"][:, tokens]
      np.testing.assert_allclose(got, grads[name], atol=1e-12, err_msg=f"{number} {name}")
    if number == 0:
      assert rel_rms(packed["dS0"], grads["S0"]) < 1e-12
    start += length
  assert rel_rms(packed["S"], S) < 1e-12


@pytest.mark.parametrize("gate", GATES)
def test_resuming_from_a_state_equals_the_full_sequence(gate):
  inputs = jax_inputs(spec_of(40, gate, False))
  S0 = inputs.pop("S0")
  f = jax.jit(lambda x, S0: delta_rule(**x, S0=S0, chunk=16, implementation="chunkwise"))
  o, S = f(inputs, S0)
  for split in (1, 16, 23, 39):
    o1, S1 = f({n: x[:, :split] for n, x in inputs.items()}, S0)
    o2, S2 = f({n: x[:, split:] for n, x in inputs.items()}, S1)
    assert rel_rms(jnp.concatenate([o1, o2], axis=1), o) < 1e-12 and rel_rms(S2, S) < 1e-12


@pytest.mark.parametrize("gate", GATES)
def test_vmap_of_the_gradient(gate):
  """vmap adds an axis; XLA:CPU is known to crash on too many."""
  inputs = [jax_inputs(spec_of(40, gate, False), seed, dtype="float32") for seed in (0, 1)]
  stacked = jax.tree.map(lambda *x: jnp.stack(x), *inputs)
  grad = jax.grad(lambda x: delta_rule(**x, chunk=32)[0].sum())
  got = jax.jit(jax.vmap(grad))(stacked)
  want = jax.jit(grad)(inputs[1])
  for name in want:
    assert rel_rms(got[name][1], want[name]) < 1e-6, name


@pytest.mark.parametrize("gate", GATES)
def test_step_continues_exactly(gate):
  inputs = jax_inputs(spec_of(9, gate, False))
  want, S_want = delta_rule(**inputs, implementation="recurrent", scale=0.5)
  S = inputs.pop("S0")
  for t in range(9):
    token = [inputs[n][:, t] for n in ("q", "k", "v", "beta")]
    g_t = inputs["g"][:, t] if gate != "none" else None
    o_t, S = delta_rule_step(*token, S, g_t, scale=0.5)
    assert rel_rms(o_t, want[:, t]) < 1e-14
  assert rel_rms(S, S_want) < 1e-14


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("implementation", ["chunkwise", "parallel"])
def test_causality(gate, implementation):
  """The output at t has gradients that are exactly zero for every later token."""
  inputs = jax_inputs(spec_of(40, gate, False), dtype="float32")

  @jax.jit
  def gradients(t):
    f = lambda x: delta_rule(**x, chunk=16, implementation=implementation)[0]
    return jax.grad(lambda x: jnp.take(f(x), t, axis=1).sum())(inputs)

  for t in (0, 15, 16, 30):
    grads = gradients(t)
    del grads["S0"]
    for name, x in grads.items():
      np.testing.assert_array_equal(x[:, t + 1 :], 0, err_msg=name)
      if name != "g":
        assert np.any(np.asarray(x[:, t]) != 0), name


def test_segments_do_not_see_each_other():
  inputs = jax_inputs(spec_of(40, "scalar", False), dtype="float32")
  segment_ids = jnp.asarray(np.broadcast_to(np.arange(40) >= 21, (2, 40)).astype(np.int32))
  f = lambda x: delta_rule(**x, segment_ids=segment_ids, chunk=16)[0][:, 21:].sum()
  for name, x in jax.jit(jax.grad(f))(inputs).items():
    np.testing.assert_array_equal(x if name == "S0" else x[:, :21], 0, err_msg=name)


def test_two_runs_are_bitwise_equal():
  inputs = jax_inputs(spec_of(130, "scalar", True))
  first, second = (value_and_grads(inputs, "float32") for _ in range(2))
  for name in first:
    np.testing.assert_array_equal(first[name], second[name], err_msg=name)


@pytest.mark.parametrize("gate", GATES)
def test_result_does_not_depend_on_chunk_size(gate):
  inputs = jax_inputs(spec_of(100, gate, True))
  outputs = [delta_rule(**inputs, chunk=chunk) for chunk in (1, 2, 8, 64)]
  for o, S in outputs[1:]:
    assert rel_rms(o, outputs[0][0]) < 1e-12 and rel_rms(S, outputs[0][1]) < 1e-12


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_plain_jax_lowers_for_accelerators(gate, platform):
  inputs = jax_inputs(spec_of(130, gate, True), dtype="float32")
  segment_ids = inputs.pop("segment_ids")
  for implementation in ("recurrent", "chunkwise", "parallel"):
    loss = lambda x, i=implementation: delta_rule(**x, segment_ids=segment_ids, implementation=i)[
      0
    ].sum()
    lowered = jax.jit(jax.grad(loss)).trace(inputs).lower(lowering_platforms=(platform,))
    # On accelerators a float32 matmul is exact only with precision HIGHEST.
    assert "HIGHEST" in lowered.as_text()


@pytest.mark.parametrize("implementation", ["recurrent", "parallel"])
def test_forward_mode(implementation):
  """A directional derivative, against the gradient in that direction."""
  inputs = jax_inputs(spec_of(9, "scalar", False))
  f = lambda x: delta_rule(**x, implementation=implementation)[0].sum()
  _, along = jax.jvp(f, (inputs,), (inputs,))
  grads = jax.grad(lambda x: delta_rule(**x)[0].sum())(inputs)
  want = sum(jnp.vdot(grads[name], x) for name, x in inputs.items())
  np.testing.assert_allclose(along, want, rtol=1e-10)


@pytest.mark.parametrize("gate", ["none", "scalar"])
def test_second_order_gradients(gate):
  """Reverse over reverse works; forward mode raises."""
  inputs = jax_inputs(Spec(L=10, H=1, dk=4, gate=gate))

  def hessian_row(implementation):
    f = lambda x: jnp.sin(delta_rule(**x, chunk=4, implementation=implementation)[0]).sum()
    first = lambda x: sum((g * g).sum() for g in jax.grad(f)(x).values())
    return jax.jit(jax.grad(first))(inputs)

  got, want = hessian_row("chunkwise"), hessian_row("recurrent")
  for name in want:
    assert rel_rms(got[name], want[name]) < 1e-10, name
  loss = lambda v: jnp.sin(delta_rule(**{**inputs, "v": v})[0]).sum()
  for function in (loss, jax.grad(loss)):
    with pytest.raises(TypeError, match=r'forward-mode .*="recurrent" or "parallel"'):
      jax.jvp(function, (inputs["v"],), (inputs["v"],))


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
  spec=st.builds(
    Spec,
    B=st.integers(1, 2),
    L=st.integers(1, 40),
    H=st.integers(1, 2),
    Hv=st.sampled_from([2, 4]),
    dk=st.integers(1, 9),
    dv=st.integers(1, 9),
    gate=st.sampled_from(GATES),
    packed=st.booleans(),
    max_beta=st.sampled_from([1.0, 2.0]),
  ),
  chunk=st.sampled_from([1, 2, 4, 8, 16]),
  dtype=st.sampled_from(["float64", "float32", "bfloat16"]),
  seed=st.integers(0, 1000),
)
def test_any_shape(spec, chunk, dtype, seed):
  inputs = jax_inputs(spec, seed)
  S0 = inputs["S0"].astype("float32" if dtype == "bfloat16" else dtype)
  cast = lambda n, x: x if n == "segment_ids" else x.astype(dtype)
  narrow = {n: cast(n, x) for n, x in inputs.items()} | {"S0": S0}
  wide = {n: x if n == "segment_ids" else x.astype("float64") for n, x in narrow.items()}
  o, S = jax.jit(lambda x: delta_rule(**x, chunk=chunk))(narrow)
  o_want, S_want = jax.jit(lambda x: delta_rule(**x, implementation="recurrent"))(wide)
  # Too few numbers for an RMS: allow the error of a few roundings of 1.
  limit = 4 * REL_RMS[dtype][0]
  np.testing.assert_allclose(np.asarray(o, np.float64), o_want, rtol=limit, atol=4 * limit)
  np.testing.assert_allclose(S, S_want, rtol=limit, atol=4 * limit)


ZEROS = {
  "q": (2, 8, 2, 4),
  "k": (2, 8, 2, 4),
  "v": (2, 8, 4, 5),
  "beta": (2, 8, 4),
}


def test_empty_tokens_raise(no_type_checks):
  q_t, v_t, beta_t = jnp.zeros((2, 2, 4)), jnp.zeros((2, 4, 5)), jnp.zeros((2, 4))
  S = jnp.zeros((2, 4, 4, 5))
  for token, words in (
    ((q_t, q_t, v_t[..., :0]), r"v_t has shape \(2, 4, 0\), expected \[B, Hv, dv\]"),
    ((q_t[..., :0], q_t[..., :0], v_t), r"q_t has shape \(2, 2, 0\), expected non-empty"),
    ((q_t, q_t[:1], v_t), r"k_t has shape \(1, 2, 4\), expected q_t's"),
  ):
    with pytest.raises(ValueError, match=words):
      delta_rule_step(*token, beta_t, S)


@pytest.mark.parametrize(
  "change,message",
  [
    ({"q": jnp.zeros((8, 2, 4))}, "q has shape (8, 2, 4), expected non-empty [B, L, H, dk]"),
    ({"q": jnp.zeros((2, 0, 2, 4))}, "q has shape (2, 0, 2, 4), expected non-empty"),
    ({"k": jnp.zeros((2, 8, 1, 4))}, "k has shape (2, 8, 1, 4), expected q's [B, L, H, dk]"),
    ({"v": jnp.zeros((2, 8, 3, 5))}, "v has shape (2, 8, 3, 5), expected [B, L, Hv, dv]"),
    ({"v": jnp.zeros((2, 7, 4, 5))}, "v has shape (2, 7, 4, 5), expected [B, L, Hv, dv]"),
    ({"v": jnp.zeros((2, 8, 4, 0))}, "v has shape (2, 8, 4, 0), expected [B, L, Hv, dv]"),
    ({"q": jnp.zeros((2, 8, 2, 0))}, "q has shape (2, 8, 2, 0), expected non-empty"),
    ({"beta": jnp.zeros((2, 8, 2))}, "beta has shape (2, 8, 2), expected [B, L, Hv] = [2, 8, 4]"),
    ({"g": jnp.zeros((2, 8, 4, 5))}, "g has shape (2, 8, 4, 5), expected [B, L, Hv] = [2, 8, 4]"),
    ({"S0": jnp.zeros((2, 4, 5, 4))}, "S0 has shape (2, 4, 5, 4), expected [B, Hv, dk, dv]"),
    ({"q": jnp.zeros((2, 8, 2, 4), int)}, "q has dtype int64, expected a floating dtype"),
    ({"segment_ids": jnp.zeros((8,), int)}, "segment_ids has shape (8,) and dtype int64"),
    ({"segment_ids": jnp.zeros((2, 8))}, "segment_ids has shape (2, 8) and dtype float64"),
    ({"chunk": 48}, "chunk is 48, expected a power of two"),
    ({"chunk": 0}, "chunk is 0, expected a power of two"),
    ({"implementation": "cuda"}, "implementation is 'cuda', expected one of ['pallas_tpu'"),
    ({"implementation": "recurrent", "interpret": True}, "interpret=True is for Pallas kernels"),
    (
      {"inverse_precision": "bf16"},
      "inverse_precision is 'bf16', expected None",
    ),
  ],
)
def test_error_names_the_wrong_input(change, message, no_type_checks):
  arguments = {name: jnp.zeros(shape) for name, shape in ZEROS.items()} | change
  with pytest.raises(ValueError, match=re.escape(message)):
    delta_rule(**arguments)
