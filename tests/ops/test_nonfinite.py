"""NaN propagation: a NaN reaches only outputs and gradients that may depend on its token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanet_jax.models import preset
from deltanet_jax.ops import (
  cached_attention,
  causal_attention,
  delta_rule,
  dplr,
  init_cache,
  linear_attention,
  selective_scan,
  short_conv,
)
from deltanet_jax.ops.testing import Spec, random_inputs
from tests.support.delta_rule import jax_inputs
from tests.support.models import random_model

L, T = 20, 11  # the NaN is at T, in a chunk's middle
LENGTHS = (3, 5, 6, 6)  # segments; T is in the third, whose chunk contains others too
IDS = np.repeat([0, 1, 2, 0], LENGTHS)[None].astype(np.int32)
OTHERS = np.repeat([True, True, False, True], LENGTHS)
RNG = np.random.default_rng(0)


def draw(*shape):
  return RNG.standard_normal((1, L, *shape))


def only(inputs, names):
  return {name: inputs[name] for name in names}


DELTA = random_inputs(Spec(L=L, H=2, dk=4, dv=6, gate="scalar"))
VECTOR = random_inputs(Spec(L=L, H=2, dk=4, dv=6, gate="vector"))
QKV = dict(q=draw(2, 4), k=draw(1, 4), v=draw(1, 4))
SCAN = dict(u=draw(3), dt=np.abs(draw(3)), B=draw(2), C=draw(2))
DPLR = only(VECTOR, ("q", "k", "v", "g", "S0")) | dict(a=0.3 * draw(2, 4), b=0.3 * draw(2, 4))
A = jnp.asarray(-np.abs(RNG.standard_normal((3, 2))))


def attend_to_cache(**x):
  return cached_attention(**x, cache=init_cache(1, L, 1, 4, "float64"))


# Operator, its inputs, and the input that only reads: later tokens do not depend on it.
FORMS = {
  "delta recurrent": (functools.partial(delta_rule, implementation="recurrent"), DELTA, "q"),
  "delta parallel": (functools.partial(delta_rule, implementation="parallel"), DELTA, "q"),
  "linear recurrent": (
    functools.partial(linear_attention, implementation="recurrent"),
    only(VECTOR, ("q", "k", "v", "g")),
    "q",
  ),
  "linear chunkwise": (
    functools.partial(linear_attention, chunk=8),
    only(VECTOR, ("q", "k", "v", "g")),
    "q",
  ),
  "attention": (lambda **x: (causal_attention(**x), 0.0), QKV, "q"),
  "window": (lambda **x: (causal_attention(**x, window=4), 0.0), QKV, "q"),
  "cache": (lambda **x: (attend_to_cache(**x)[0], 0.0), QKV, "q"),
  "scan recurrent": (
    functools.partial(selective_scan, A=A, implementation="recurrent"),
    SCAN,
    "C",
  ),
  "scan chunkwise": (functools.partial(selective_scan, A=A, chunk=8), SCAN, "C"),
  "dplr recurrent": (functools.partial(dplr, implementation="recurrent"), DPLR, "q"),
  "dplr chunkwise": (functools.partial(dplr, chunk=8), DPLR, "q"),
  "conv": (lambda x, **ids: (short_conv(x, jnp.ones((4, 3)), **ids)[0], 0.0), dict(x=draw(3)), ""),
}


@pytest.mark.parametrize("name", FORMS)
def test_operators(name):
  f, inputs, reader = FORMS[name]
  inputs = jax.tree.map(jnp.asarray, dict(inputs))
  S0 = {"S0": inputs.pop("S0")} if "S0" in inputs else {}

  @jax.jit
  def run(x):
    (o, S), pull = jax.vjp(lambda x: f(**x, **S0, segment_ids=jnp.asarray(IDS)), x)
    d = jnp.cos(jnp.arange(o.size, dtype=o.dtype)).reshape(o.shape)
    return o, S, pull((d, jnp.zeros_like(S)))[0], f(**x, **S0)[0]

  o, S, grads, alone = run(inputs)
  for which in inputs:
    poisoned = inputs | {which: inputs[which].at[:, T].set(jnp.nan)}
    o2, S2, grads2, alone2 = run(poisoned)
    np.testing.assert_array_equal(o2[:, OTHERS], o[:, OTHERS], err_msg=which)
    np.testing.assert_array_equal(S2, S, err_msg=which)
    np.testing.assert_array_equal(alone2[:, :T], alone[:, :T], err_msg=which)
    assert np.isnan(alone2[:, T]).all(), which
    # Later tokens depend on it too, unless the input only reads.
    assert np.isnan(alone2[:, T + 1]).all() == (which != reader), which
    for of, x in grads.items():
      np.testing.assert_allclose(grads2[of][:, OTHERS], x[:, OTHERS], rtol=1e-9, atol=1e-12)


def test_a_nonfinite_state_affects_only_the_first_segment():
  for name in ("delta parallel", "linear chunkwise", "dplr chunkwise"):
    f, inputs, _ = FORMS[name]
    inputs = jax.tree.map(jnp.asarray, dict(inputs))
    S0 = jnp.zeros((1, 2, 4, 6)).at[0, 1, 2, 3].set(jnp.inf)
    o, S = jax.jit(lambda x: f(**x, segment_ids=jnp.asarray(IDS)))(inputs | dict(S0=S0))
    assert np.isnan(o[:, : LENGTHS[0], 1]).all() and np.isfinite(o[:, :, 0]).all()
    assert np.isfinite(o[:, LENGTHS[0] :]).all() and np.isfinite(S).all()


@pytest.mark.parametrize("family", ["deltanet", "gla-conv", "mamba", "mlstm", "transformer"])
def test_models(family):
  """With one NaN embedding, earlier logits and other segments are unchanged."""
  changes = dict(implementation="recurrent") if family == "deltanet" else {}
  changes |= dict(vocab=11, width=8, depth=1, mlp_ratio=0.0)
  model = random_model(preset(f"{family}-tiny", **changes))
  tokens = jnp.asarray(RNG.integers(0, 10, (1, L)), jnp.int32).at[0, T].set(10)
  run = jax.jit(lambda model: (model(tokens), model(tokens, jnp.asarray(IDS))))
  alone, packed = run(model)
  model.embedding[...] = model.embedding[...].at[10].set(jnp.nan)
  nan, nan_packed = run(model)
  np.testing.assert_array_equal(nan[:, :T], alone[:, :T])
  assert np.isnan(nan[:, T:]).all()
  np.testing.assert_array_equal(nan_packed[:, OTHERS], packed[:, OTHERS])


@pytest.mark.parametrize("gate", ["scalar", "vector"])
@pytest.mark.parametrize("form", ["chunkwise", "parallel"])
def test_a_gate_of_minus_infinity_resets_the_state(gate, form):
  inputs = jax_inputs(Spec(B=1, L=12, H=2, dk=4, gate=gate), dtype="float32")
  inputs["g"] = inputs["g"].at[:, 7].set(-jnp.inf)
  runs = {name: delta_rule(**inputs, implementation=name)[0] for name in ("recurrent", form)}
  np.testing.assert_allclose(runs[form], runs["recurrent"], rtol=1e-4, atol=1e-5)
  if form == "chunkwise":
    del inputs["beta"]
    runs = {name: linear_attention(**inputs, implementation=name)[0] for name in runs}
    np.testing.assert_allclose(runs[form], runs["recurrent"], rtol=1e-4, atol=1e-5)
