"""The dispatch tables: validation, defaults by platform, and adding an implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanet_jax.ops import (
  causal_attention,
  compiling_for,
  delta_rule,
  delta_rule_step,
  dplr,
  head_norm,
  linear_attention,
  linear_attention_step,
  log_max_scan,
  long_conv,
  rope,
  selective_scan,
  short_conv,
  state_space,
  target_platform,
)
from deltanet_jax.ops.attention.api import CAUSAL_ATTENTION
from deltanet_jax.ops.delta_rule import DELTA_RULE
from deltanet_jax.ops.dispatch import PLATFORMS, Entry
from deltanet_jax.ops.dplr import DPLR
from deltanet_jax.ops.head_norm import HEAD_NORM
from deltanet_jax.ops.linear_attention.api import LINEAR_ATTENTION
from deltanet_jax.ops.log_max_scan.api import LOG_MAX_SCAN
from deltanet_jax.ops.long_conv.api import LONG_CONV
from deltanet_jax.ops.rope import ROPE
from deltanet_jax.ops.selective_scan.api import SELECTIVE_SCAN
from deltanet_jax.ops.short_conv import SHORT_CONV
from deltanet_jax.ops.state_space.api import STATE_SPACE


def zeros(*shape, dtype="float32"):
  return jnp.zeros(shape, dtype)


X, STATE = zeros(1, 4, 2, 8), zeros(1, 2, 8, 8)
TOKEN, ONE = zeros(1, 2, 8), zeros(1, 2)
COMPLEX = zeros(3, 2, dtype="complex64")
# Operator, its table, and arguments.
OPERATORS = {
  "delta_rule": (delta_rule, DELTA_RULE, (X, X, X, zeros(1, 4, 2))),
  "delta_rule_step": (delta_rule_step, DELTA_RULE, (TOKEN, TOKEN, TOKEN, ONE, STATE)),
  "linear_attention": (linear_attention, LINEAR_ATTENTION, (X, X, X)),
  "linear_attention_step": (
    linear_attention_step,
    LINEAR_ATTENTION,
    (TOKEN, TOKEN, TOKEN, STATE),
  ),
  "dplr": (dplr, DPLR, (X,) * 5),
  "causal_attention": (causal_attention, CAUSAL_ATTENTION, (X, X, X)),
  "selective_scan": (
    selective_scan,
    SELECTIVE_SCAN,
    (zeros(1, 4, 3), zeros(1, 4, 3), zeros(3, 2), zeros(1, 4, 2), zeros(1, 4, 2)),
  ),
  "long_conv": (long_conv, LONG_CONV, (zeros(1, 4, 3), zeros(4, 3))),
  "log_max_scan": (
    log_max_scan,
    LOG_MAX_SCAN,
    (zeros(1, 4, 3), zeros(1, 4, 3), zeros(3), zeros(3)),
  ),
  "state_space": (state_space, STATE_SPACE, (zeros(1, 4, 3), COMPLEX, COMPLEX, COMPLEX)),
  "short_conv": (short_conv, SHORT_CONV, (zeros(1, 4, 3), zeros(4, 3))),
  "head_norm": (head_norm, HEAD_NORM, (zeros(1, 4, 16), zeros(8), 1e-6)),
  "rope": (rope, ROPE, (X, zeros(1, 4, dtype="int32"))),
}
INTERPRETABLE = [
  name
  for name, (_, operator, _) in OPERATORS.items()
  if any(entry.interpretable for entry in operator.table.values())
]


def plain_names(operator):
  return [name for name, entry in operator.table.items() if not entry.interpretable]


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_rejects_an_unknown_name_with_the_same_sentence(name):
  f, operator, args = OPERATORS[name]
  names = list(operator.table)
  message = f"implementation is 'foo', expected one of {names} for {operator.name}."
  with pytest.raises(ValueError) as raised:
    f(*args, implementation="foo")
  assert str(raised.value) == message


@pytest.mark.parametrize("name", INTERPRETABLE)
def test_interpret_is_for_kernels_with_the_same_sentence(name):
  f, operator, args = OPERATORS[name]
  kernels = [name for name, entry in operator.table.items() if entry.interpretable]
  for implementation in (None, *plain_names(operator)):
    message = (
      f"interpret=True is for Pallas kernels, expected implementation to be one of {kernels} for"
      f" {operator.name}, got {implementation!r}."
    )
    with pytest.raises(ValueError) as raised:
      f(*args, implementation=implementation, interpret=True)
    assert str(raised.value) == message


@pytest.mark.parametrize("name", OPERATORS)
def test_every_platform_has_a_default(name):
  """The last fallback of every platform is a plain implementation."""
  operator = OPERATORS[name][1]
  everywhere = [n for n, entry in operator.table.items() if entry.default_on == PLATFORMS]
  assert everywhere and not operator.table[everywhere[-1]].interpretable


@pytest.mark.parametrize("name", INTERPRETABLE)
def test_a_named_kernel_never_falls_back(name):
  f, operator, args = OPERATORS[name]
  wide = [x.astype("float64") if getattr(x, "dtype", None) == jnp.float32 else x for x in args]
  for implementation, entry in operator.table.items():
    if entry.interpretable:
      words = f'{operator.name} with implementation="{implementation}" does not support'
      with pytest.raises(ValueError, match=words):
        f(*wide, implementation=implementation)


def defaults(operator, *inputs):
  """Name of the default implementation of each platform."""
  names = {}
  for platform in PLATFORMS:
    with compiling_for(platform):
      entry = operator.resolve(None, *inputs)
    names[platform] = next(n for n, other in operator.table.items() if other is entry)
  return names


def test_defaults():
  """`implementation=None` takes the platform's fastest that supports the inputs."""
  kernels = dict(cpu="chunkwise", gpu="pallas_gpu", tpu="pallas_tpu")
  portable = dict.fromkeys(PLATFORMS, "chunkwise")
  beta = zeros(1, 4, 2)
  vector = zeros(1, 4, 2, 8)
  for g in (None, beta, vector):
    assert defaults(DELTA_RULE, X, X, X, beta, g, None) == kernels
    assert defaults(LINEAR_ATTENTION, X, X, X, g, None, None) == kernels
  assert defaults(DELTA_RULE, TOKEN, TOKEN, TOKEN, ONE, None, STATE) == kernels
  assert defaults(DELTA_RULE, X, X, zeros(1, 4, 2, 513), beta, None, None) == portable
  assert defaults(LINEAR_ATTENTION, X, X, X, None, X, None) == portable
  assert defaults(DPLR) == portable

  attention = lambda x, ids=None: defaults(CAUSAL_ATTENTION, x, x, x, ids)
  half, ids = X.astype("bfloat16"), zeros(1, 4, dtype="int32")
  # cuDNN needs a GPU in this process: its version is queried.
  assert attention(half) == dict(cpu="plain", gpu="pallas_gpu", tpu="pallas_tpu")
  assert attention(half, ids) == dict(cpu="plain", gpu="pallas_gpu", tpu="pallas_tpu")
  assert attention(X) == dict.fromkeys(PLATFORMS, "xla")
  assert attention(X.astype("float64")) == dict.fromkeys(PLATFORMS, "plain")
  half = zeros(1, 4, 2, 256, dtype="bfloat16")
  assert attention(half) == dict(cpu="plain", gpu="plain", tpu="pallas_tpu")

  heads = zeros(1, 4, 2, 64)
  plain = dict.fromkeys(PLATFORMS, "plain")
  assert defaults(ROPE, heads) == plain | dict(tpu="pallas_tpu")
  assert defaults(ROPE, heads[:, :1]) == defaults(ROPE, heads[..., :24]) == plain
  assert defaults(HEAD_NORM, zeros(1, 4, 16), zeros(8), None) == plain | dict(gpu="pallas_gpu")
  assert defaults(HEAD_NORM, zeros(1, 4, 24), zeros(12), None) == plain


def test_cudnn_is_the_default_of_a_gpu_for_unpacked_half_precision(monkeypatch):
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  half, ids = X.astype("bfloat16"), zeros(1, 4, dtype="int32")
  chosen = lambda x, ids=None: CAUSAL_ATTENTION.resolve(None, x, x, x, ids)
  table = CAUSAL_ATTENTION.table
  assert chosen(half) is table["cudnn"]
  assert chosen(half, ids) is table["pallas_gpu"]
  assert chosen(half[:, :3]) is table["pallas_gpu"]
  assert chosen(X) is table["xla"]


def test_adding_an_implementation_is_one_entry(monkeypatch):
  x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 4, 2, 8)), "float32")
  beta = zeros(1, 4, 2)

  def constant(q, k, v, beta, g, S0, segment_ids, options):
    return jnp.full_like(v, options.scale), STATE

  entry = Entry(run=constant, default_on=("gpu",))
  with monkeypatch.context() as patch:
    patch.setattr(DELTA_RULE, "table", {"constant": entry} | DELTA_RULE.table)
    o, _ = delta_rule(x, x, x, beta, scale=3.0, implementation="constant")
    np.testing.assert_array_equal(o, 3.0)
    with compiling_for("gpu"):
      o, _ = delta_rule(x, x, x, beta, scale=5.0)
    np.testing.assert_array_equal(o, 5.0)
    # Other platforms keep their defaults; beta = 0 writes nothing.
    np.testing.assert_array_equal(delta_rule(x, x, x, beta)[0], 0)
    with pytest.raises(ValueError, match=r"expected one of \['constant', 'pallas_tpu'"):
      delta_rule(x, x, x, beta, implementation="foo")
  with pytest.raises(ValueError, match="implementation is 'constant'"):
    delta_rule(x, x, x, beta, implementation="constant")


def test_the_target_platform_is_part_of_the_cache_key():
  traced = []

  @jax.jit
  def f(x):
    traced.append(target_platform())
    return x

  for platform in ("tpu", "gpu", "tpu"):
    with compiling_for(platform):
      f(X)
  f(X)
  assert traced == ["tpu", "gpu", "cpu"]
  with pytest.raises(ValueError, match="platform is 'cuda', expected one of"):
    compiling_for("cuda")
