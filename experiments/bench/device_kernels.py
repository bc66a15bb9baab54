"""Every kernel as a function to check and to time, with its inputs and its definition."""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from deltanet_jax.ops import (
  causal_attention,
  delta_rule,
  delta_rule_step,
  head_norm,
  linear_attention,
  linear_attention_step,
  rope,
  short_conv,
  short_convs,
  testing,
)
from deltanet_jax.ops.epilogue import Epilogue
from deltanet_jax.ops.testing import (
  ILL_CONDITIONED,
  Spec,
  ill_conditioned_inputs,
  random_inputs,
)

# Implementations of each platform; "unfused" is the paper's design around a UT kernel.
RULES = {"tpu": ("pallas_tpu",), "gpu": ("pallas_gpu", "pallas_gpu unfused", "triton")}
KERNELS = {"tpu": "pallas_tpu", "gpu": "pallas_gpu"}
CHANNELS = ("pallas_tpu", "pallas_gpu")  # those with gates of key channels
DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Sizes:
  spec: Spec
  ugly: tuple[str, ...]
  ugly_length: int
  chunk: int | None
  dtypes: dict[str, tuple[str, ...]]  # by kind of inputs; of a rule with documents alone, too


# On a device its own chunks and more than one of them, off their grid; interpreted as small as can
# be: every program compiles for seconds there.
DEVICE = Sizes(
  Spec(B=2, L=1000, H=4, dk=128),
  ILL_CONDITIONED,
  4096,
  None,
  dict(plain=DTYPES, documents=("bfloat16",), full=DTYPES, channels=DTYPES),
)
INTERPRETED = Sizes(
  Spec(B=1, L=40, H=1, Hv=2, dk=16, dv=32),
  ("identical_beta_2",),
  256,
  32,
  dict(plain=("float32",), documents=(), full=DTYPES, channels=("float32",)),
)


@dataclasses.dataclass(frozen=True)
class DeviceCase:
  """One kernel with one kind of inputs in one dtype."""

  kernel: str
  inputs: str
  dtype: str
  arrays: dict
  run: Callable  # (**arrays) -> outputs, by the kernel
  truth: Callable  # the same by the definition
  plain: Callable | None  # by plain XLA, to compare its time
  gradients: bool = True

  @property
  def key(self) -> dict[str, str]:
    return dict(kernel=self.kernel, inputs=self.inputs, dtype=self.dtype)

  @property
  def names(self) -> tuple[str, ...]:
    if self.kernel.startswith("joint conv"):
      return ("q", "k", "v", "beside")
    alone = ("attention", "rope", "short conv", "head norm")
    return ("o",) if self.kernel.startswith(alone) else ("o", "S")


def cases(platforms: tuple[str, ...], interpret: bool, triton: bool) -> Iterator[DeviceCase]:
  """All of them; the first kernel that is broken need not be the last one checked.

  Args:
    triton: whether jax-triton is there; it has no interpreter.
  """
  sizes = INTERPRETED if interpret else DEVICE
  options = dict(interpret=True) if interpret else {}
  for platform in platforms:
    for name in RULES[platform]:
      if name != "triton" or triton:
        yield from _rules(name, sizes, options)
    for others in (_others, _rope, _linear, _convs, _joint_convs, _norms):
      yield from others(KERNELS[platform], sizes, options)


def _specs(name, spec):
  """The kinds of inputs that a kernel serves."""
  full = dataclasses.replace(spec, gate="scalar", packed=True)
  found = dict(plain=spec, documents=dataclasses.replace(spec, packed=True), full=full)
  channels = dict(channels=dataclasses.replace(full, gate="vector"))
  return found | (channels if name in CHANNELS else {})


def _rules(name, sizes, options):
  if name.endswith("unfused"):
    from pallas_kernels.delta_rule import delta_rule_gpu

    run = functools.partial(delta_rule_gpu, fused=False, chunk=sizes.chunk, **options)
  else:
    run = functools.partial(delta_rule, implementation=name, chunk=sizes.chunk, **options)
  truth = functools.partial(delta_rule, implementation="recurrent")
  plain = functools.partial(delta_rule, implementation="chunkwise")
  make = functools.partial(DeviceCase, kernel=name, run=run, truth=truth, plain=plain)
  for inputs, spec in _specs(name, sizes.spec).items():
    for dtype in sizes.dtypes[inputs]:
      yield make(inputs=inputs, dtype=dtype, arrays=random_inputs(spec))
  for kind in sizes.ugly:
    arrays = ill_conditioned_inputs(kind, L=sizes.ugly_length)
    yield make(inputs=kind, dtype="float32", arrays=arrays, plain=None)


def _linear(name, sizes, options):
  """Linear attention, over a sequence and one token."""
  forms = lambda rule: [
    functools.partial(rule, implementation=name, **options),
    functools.partial(rule, implementation="recurrent"),
    functools.partial(rule, implementation="chunkwise"),
  ]
  for inputs, spec in _specs(name, sizes.spec).items():
    arrays = {n: x for n, x in random_inputs(spec).items() if n != "beta"}
    for dtype in sizes.dtypes[inputs]:
      yield DeviceCase(f"linear attention {name}", inputs, dtype, arrays, *forms(linear_attention))
  one = random_inputs(dataclasses.replace(sizes.spec, L=1, gate="vector"))
  token = {f"{n}_t": one[n][:, 0] for n in ("q", "k", "v", "g")} | dict(S=one["S0"])
  steps = forms(linear_attention_step)
  for dtype in DTYPES:
    yield DeviceCase(
      f"step linear attention {name}", "channels", dtype, token, *steps, gradients=False
    )


def _convs(name, sizes, options):
  """Short convolutions with what follows them, of one document and of several."""
  rng = np.random.default_rng(0)
  L, width = sizes.spec.L, 256
  arrays = dict(x=rng.standard_normal((2, L, width)), kernel=rng.standard_normal((4, width)))
  ids = np.cumsum(rng.random((2, L)) < 4 / L, axis=1).astype(np.int32)
  epilogue = Epilogue("silu", "l2", 128)
  by = lambda implementation, **more: (
    lambda **x: short_conv(**x, epilogue=epilogue, implementation=implementation, **more)[:1]
  )
  forms = (by(name, **options), by("plain"), by("plain"))
  for inputs, more in (("plain", {}), ("full", dict(segment_ids=ids))):
    for dtype in sizes.dtypes[inputs]:
      yield DeviceCase(f"short conv {name}", inputs, dtype, arrays | more, *forms)


def _joint_convs(name, sizes, options):
  """Those of q, k and v of one product, with columns beside them, which a GPU has alone."""
  if name != "pallas_gpu":
    return
  rng = np.random.default_rng(0)
  L, widths = sizes.spec.L, dict(q=256, k=256, v=512)
  x = dict(x=rng.standard_normal((2, L, sum(widths.values()) + 16)))
  arrays = x | {name: rng.standard_normal((4, width)) for name, width in widths.items()}
  ids = np.cumsum(rng.random((2, L)) < 4 / L, axis=1).astype(np.int32)
  epilogues = [Epilogue("silu", "l2", 128)] * 2 + [Epilogue("silu", size=256)]

  def joint(x, q, k, v, segment_ids=None):
    return tuple(short_convs(x, (q, k, v), epilogues, segment_ids=segment_ids, **options))

  def each(x, q, k, v, segment_ids=None):
    *own, beside = jnp.split(x, np.cumsum(list(widths.values())), axis=2)
    conv = functools.partial(short_conv, segment_ids=segment_ids, implementation="plain")
    outs = [conv(y, w, epilogue=epilogue)[0] for y, w, epilogue in zip(own, (q, k, v), epilogues)]
    return *outs, beside

  for inputs, more in (("plain", {}), ("full", dict(segment_ids=ids))):
    for dtype in sizes.dtypes[inputs]:
      yield DeviceCase(f"joint conv {name}", inputs, dtype, arrays | more, joint, each, each)


def _norms(name, sizes, options):
  """Norms of an output's heads, and with a gate, which have a kernel on GPU alone."""
  if name != "pallas_gpu":
    return
  rng = np.random.default_rng(0)
  shape = (2, sizes.spec.L, 256)
  arrays = dict(x=rng.standard_normal(shape), scale=rng.standard_normal(128))
  gate = dict(gate=rng.standard_normal(shape))
  norm = functools.partial(head_norm, eps=1e-6, gate_activation=jax.nn.silu)
  by = lambda implementation, **more: (
    lambda **x: (norm(**x, implementation=implementation, **more),)
  )
  forms = (by(name, **options), by("plain"), by("plain"))
  for inputs, more in (("plain", {}), ("full", gate)):
    for dtype in sizes.dtypes[inputs]:
      yield DeviceCase(f"head norm {name}", inputs, dtype, arrays | more, *forms)


def _others(name, sizes, options):
  """A decoding step, and attention, which serves bfloat16 alone."""
  one = random_inputs(dataclasses.replace(sizes.spec, L=1, gate="scalar"))
  token = {f"{n}_t": x[:, 0] for n, x in one.items() if n != "S0"} | dict(S=one["S0"])
  step = functools.partial(delta_rule_step, implementation=name, **options)
  exact = functools.partial(delta_rule_step, implementation="recurrent")
  for dtype in DTYPES:
    yield DeviceCase(f"step {name}", "full", dtype, token, step, exact, exact, gradients=False)
  rng = np.random.default_rng(0)
  L, d = sizes.spec.L, sizes.spec.dk
  heads = lambda d, H, Hk: {n: rng.standard_normal((2, L, H if n == "q" else Hk, d)) for n in "qkv"}
  # Tiles are those of heads of 64, and with all of it those of larger ones, which share keys.
  arrays = heads(min(d, 64), 2, 2)
  ids = np.cumsum(rng.random((2, L)) < 4 / L, axis=1).astype(np.int32)
  attend = lambda implementation, **more: (
    lambda **x: (causal_attention(**x, implementation=implementation, **more),)
  )
  window = max(L // 3, 1)
  documents = dict(segment_ids=ids)
  kinds = dict(plain=(None, arrays), window=(window, arrays), full=(None, arrays | documents))
  kinds["full window"] = (window, heads(d, 2, 1) | documents)
  for inputs, (window, given) in kinds.items():
    run, plain = attend(name, window=window, **options), attend("plain", window=window)
    yield DeviceCase(f"attention {name}", inputs, "bfloat16", given, run, plain, plain)


def _rope(name, sizes, options):
  """Rotary positions, which have a kernel on TPU alone."""
  if name != "pallas_tpu":
    return
  rng = np.random.default_rng(0)
  x = rng.standard_normal((2, sizes.spec.L, 2, 64))
  # Small ones: float32 holds the angle of position 4096 to 1e-4, in any form.
  positions = rng.integers(0, 64, x.shape[:2]).astype(np.int32)
  by = lambda implementation, **more: (
    lambda x: (rope(x, positions, implementation=implementation, **more),)
  )
  for dtype in DTYPES:
    forms = (by(name, **options), by("plain"), by("plain"))
    yield DeviceCase(f"rope {name}", "plain", dtype, dict(x=x), *forms)


def rounded(case: DeviceCase) -> dict[str, jax.Array]:
  """Its inputs in its dtype, a state in float32."""
  arrays = {("S0" if name == "S" else name): x for name, x in case.arrays.items()}
  found = testing.cast(arrays, case.dtype)
  return {("S" if "S" in case.arrays and name == "S0" else name): x for name, x in found.items()}


def program(case: DeviceCase, f: Callable) -> Callable[[dict], dict]:
  """Outputs of f, and where the case has them all gradients for random cotangents; compiled."""
  if not case.gradients:
    return jax.jit(lambda x: dict(zip(case.names, f(**x))))
  run = testing.with_gradients(f, case.names)
  return lambda x: run(x, testing.random_cotangents(f, x))


def truth(case: DeviceCase) -> dict[str, np.ndarray]:
  """What float64 gives on the host, from the rounded inputs."""
  with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
    wide = {
      name: np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else np.asarray(x)
      for name, x in rounded(case).items()
    }
    return jax.tree.map(np.asarray, program(case, case.truth)(jax.tree.map(jnp.asarray, wide)))
