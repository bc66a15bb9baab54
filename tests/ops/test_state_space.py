"""The diagonal state space by convolution against its recurrence: values and every gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanet_jax.ops import state_space
from deltanet_jax.ops.testing import rel_rms

B, D, N = 2, 3, 4


def inputs(L):
  rng = np.random.default_rng(0)
  real = rng.standard_normal
  draw = lambda *shape: jnp.asarray(real(shape) + 1j * real(shape))
  u = jnp.asarray(rng.standard_normal((B, L, D)))
  # Some states decay within the sequence, some hardly at all.
  log_A = jnp.asarray(-(10.0 ** rng.uniform(-3, 0, (D, N))) + 1j * real((D, N)))
  return dict(u=u, log_A=log_A, B=draw(D, N), C=draw(D, N), S0=draw(B, D, N))


def value_and_gradients(x, implementation, segment_ids):
  @jax.jit
  def run(x):
    f = lambda x: state_space(**x, segment_ids=segment_ids, implementation=implementation)
    (y, S), pull = jax.vjp(f, x)
    rng = np.random.default_rng(1)
    draw = lambda z: jnp.asarray(rng.standard_normal(z.shape), z.dtype)
    return y, S, pull((draw(y), draw(S)))[0]

  return run(x)


@pytest.mark.parametrize("L,packed", [(1, False), (70, True)])
def test_convolution_equals_recurrence(L, packed):
  ids = np.cumsum(np.random.default_rng(2).random((B, L)) < 0.05, axis=1) % 3 if packed else None
  ids = None if ids is None else jnp.asarray(ids, jnp.int32)
  x = inputs(L)
  want = value_and_gradients(x, "recurrent", ids)
  errors = jax.tree.map(rel_error, value_and_gradients(x, None, ids), want)
  assert max(jax.tree.leaves(errors)) < 1e-11, errors
  if packed:
    float32 = {
      name: z.astype(jnp.float32 if name == "u" else jnp.complex64) for name, z in x.items()
    }
    y, S, _ = value_and_gradients(float32, None, ids)
    assert y.dtype == jnp.float32 and S.dtype == jnp.complex64
    assert rel_error(y, want[0]) < 1e-5 and rel_error(S, want[1]) < 1e-5


def rel_error(x, want):
  parts = lambda z: np.stack([np.real(z), np.imag(z)])
  return rel_rms(parts(x), parts(want))


def test_wrong_inputs_are_clear_errors(no_type_checks):
  x = inputs(3)
  with pytest.raises(ValueError, match="B has dtype float64, expected a complex dtype"):
    state_space(**x | dict(B=x["B"].real))
  with pytest.raises(ValueError, match=r"C has shape \(3, 3\), expected \[d, N\]"):
    state_space(**x | dict(C=x["C"][:, :3]))
