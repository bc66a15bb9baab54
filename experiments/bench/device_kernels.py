"""Cases of `device_check`: every kernel with inputs, reference and XLA implementation."""

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

# Implementations of the delta rule; "unfused" is the paper's design: a UT kernel, the rest in XLA.
DELTA_RULES = {"tpu": ("pallas_tpu",), "gpu": ("pallas_gpu", "pallas_gpu unfused", "triton")}
KERNELS = {"tpu": "pallas_tpu", "gpu": "pallas_gpu"}
PER_CHANNEL = ("pallas_tpu", "pallas_gpu")  # implementations with per-channel gates
DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Shapes, and the dtypes that are checked by kind of inputs (as in `aot.kernel_cases`)."""

  spec: Spec
  ill_conditioned: tuple[str, ...]
  ill_conditioned_length: int
  chunk: int | None
  dtypes: dict[str, tuple[str, ...]]


# On a device: several chunks of the default size, and a length that is no multiple of it.
# Interpreted: as small as possible, because every program compiles for seconds.
DEVICE = Sizes(
  Spec(B=2, L=1000, H=4, dk=128),
  ILL_CONDITIONED,
  4096,
  None,
  dict(plain=DTYPES, segments=("bfloat16",), full=DTYPES, per_channel_full=DTYPES),
)
INTERPRETED = Sizes(
  Spec(B=1, L=40, H=1, Hv=2, dk=16, dv=32),
  ("identical_beta_2",),
  256,
  32,
  dict(plain=("float32",), segments=(), full=DTYPES, per_channel_full=("float32",)),
)


@dataclasses.dataclass(frozen=True)
class DeviceCase:
  """One kernel with one kind of inputs in one dtype."""

  kernel: str
  inputs: str
  dtype: str
  arrays: dict
  run: Callable  # (**arrays) -> outputs of the kernel
  reference: Callable  # the same by the reference implementation
  xla: Callable | None  # the same by the XLA implementation, to compare times
  gradients: bool = True

  @property
  def key(self) -> dict[str, str]:
    return dict(kernel=self.kernel, inputs=self.inputs, dtype=self.dtype)

  @property
  def names(self) -> tuple[str, ...]:
    if self.kernel.startswith("qkv conv"):
      return ("q", "k", "v", "rest")
    one_output = ("attention", "rope", "short conv", "head norm")
    return ("o",) if self.kernel.startswith(one_output) else ("o", "S")


def cases(platforms: tuple[str, ...], interpret: bool, triton: bool) -> Iterator[DeviceCase]:
  """All cases of the platforms.

  Args:
    triton: whether jax-triton is installed; it has no interpreter.
  """
  sizes = INTERPRETED if interpret else DEVICE
  options = dict(interpret=True) if interpret else {}
  for platform in platforms:
    for name in DELTA_RULES[platform]:
      if name != "triton" or triton:
        yield from _delta_rules(name, sizes, options)
    for make in (_step, _attention, _rope, _linear_attention, _convs, _qkv_convs, _norms):
      yield from make(KERNELS[platform], sizes, options)


def _specs(name, spec):
  """Shapes of the kinds of inputs that a kernel supports."""
  full = dataclasses.replace(spec, gate="scalar", packed=True)
  found = dict(plain=spec, segments=dataclasses.replace(spec, packed=True), full=full)
  per_channel = dict(per_channel_full=dataclasses.replace(full, gate="vector"))
  return found | (per_channel if name in PER_CHANNEL else {})


def _delta_rules(name, sizes, options):
  if name.endswith("unfused"):
    from pallas_kernels.delta_rule import delta_rule_gpu

    run = functools.partial(delta_rule_gpu, fused=False, chunk=sizes.chunk, **options)
  else:
    run = functools.partial(delta_rule, implementation=name, chunk=sizes.chunk, **options)
  reference = functools.partial(delta_rule, implementation="recurrent")
  xla = functools.partial(delta_rule, implementation="chunkwise")
  make = functools.partial(DeviceCase, kernel=name, run=run, reference=reference, xla=xla)
  for inputs, spec in _specs(name, sizes.spec).items():
    for dtype in sizes.dtypes[inputs]:
      yield make(inputs=inputs, dtype=dtype, arrays=random_inputs(spec))
  for kind in sizes.ill_conditioned:
    arrays = ill_conditioned_inputs(kind, L=sizes.ill_conditioned_length)
    yield make(inputs=kind, dtype="float32", arrays=arrays, xla=None)


def _linear_attention(name, sizes, options):
  """Linear attention over a sequence, and its decode step."""
  implementations = lambda rule: [
    functools.partial(rule, implementation=name, **options),
    functools.partial(rule, implementation="recurrent"),
    functools.partial(rule, implementation="chunkwise"),
  ]
  for inputs, spec in _specs(name, sizes.spec).items():
    arrays = {n: x for n, x in random_inputs(spec).items() if n != "beta"}
    for dtype in sizes.dtypes[inputs]:
      yield DeviceCase(
        f"linear attention {name}", inputs, dtype, arrays, *implementations(linear_attention)
      )
  one = random_inputs(dataclasses.replace(sizes.spec, L=1, gate="vector"))
  token = {f"{n}_t": one[n][:, 0] for n in ("q", "k", "v", "g")} | dict(S=one["S0"])
  steps = implementations(linear_attention_step)
  for dtype in DTYPES:
    yield DeviceCase(
      f"linear attention step {name}", "per_channel_full", dtype, token, *steps, gradients=False
    )


def _convs(name, sizes, options):
  """Short convolutions with their epilogue, without and with segments."""
  rng = np.random.default_rng(0)
  L, width = sizes.spec.L, 256
  arrays = dict(x=rng.standard_normal((2, L, width)), kernel=rng.standard_normal((4, width)))
  ids = np.cumsum(rng.random((2, L)) < 4 / L, axis=1).astype(np.int32)
  epilogue = Epilogue("silu", "l2", 128)
  by = lambda implementation, **more: (
    lambda **x: short_conv(**x, epilogue=epilogue, implementation=implementation, **more)[:1]
  )
  implementations = (by(name, **options), by("plain"), by("plain"))
  for inputs, more in (("plain", {}), ("full", dict(segment_ids=ids))):
    for dtype in sizes.dtypes[inputs]:
      yield DeviceCase(f"short conv {name}", inputs, dtype, arrays | more, *implementations)


def _qkv_convs(name, sizes, options):
  """Fused convolutions of q, k and v, columns of one matmul whose others pass through; GPU only."""
  if name != "pallas_gpu":
    return
  rng = np.random.default_rng(0)
  L, widths = sizes.spec.L, dict(q=256, k=256, v=512)
  x = dict(x=rng.standard_normal((2, L, sum(widths.values()) + 16)))
  arrays = x | {name: rng.standard_normal((4, width)) for name, width in widths.items()}
  ids = np.cumsum(rng.random((2, L)) < 4 / L, axis=1).astype(np.int32)
  epilogues = [Epilogue("silu", "l2", 128)] * 2 + [Epilogue("silu", size=256)]

  def fused(x, q, k, v, segment_ids=None):
    return tuple(short_convs(x, (q, k, v), epilogues, segment_ids=segment_ids, **options))

  def separate(x, q, k, v, segment_ids=None):
    *own, rest = jnp.split(x, np.cumsum(list(widths.values())), axis=2)
    conv = functools.partial(short_conv, segment_ids=segment_ids, implementation="plain")
    outs = [conv(y, w, epilogue=epilogue)[0] for y, w, epilogue in zip(own, (q, k, v), epilogues)]
    return *outs, rest

  for inputs, more in (("plain", {}), ("full", dict(segment_ids=ids))):
    for dtype in sizes.dtypes[inputs]:
      yield DeviceCase(f"qkv conv {name}", inputs, dtype, arrays | more, fused, separate, separate)


def _norms(name, sizes, options):
  """Per-head RMSNorm, without and with output gate; GPU only."""
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
  implementations = (by(name, **options), by("plain"), by("plain"))
  for inputs, more in (("plain", {}), ("full", gate)):
    for dtype in sizes.dtypes[inputs]:
      yield DeviceCase(f"head norm {name}", inputs, dtype, arrays | more, *implementations)


def _step(name, sizes, options):
  """The decode step of the delta rule."""
  one = random_inputs(dataclasses.replace(sizes.spec, L=1, gate="scalar"))
  token = {f"{n}_t": x[:, 0] for n, x in one.items() if n != "S0"} | dict(S=one["S0"])
  step = functools.partial(delta_rule_step, implementation=name, **options)
  exact = functools.partial(delta_rule_step, implementation="recurrent")
  for dtype in DTYPES:
    yield DeviceCase(f"step {name}", "full", dtype, token, step, exact, exact, gradients=False)


def _attention(name, sizes, options):
  """Causal attention, in bfloat16 only."""
  rng = np.random.default_rng(0)
  L, d = sizes.spec.L, sizes.spec.dk
  heads = lambda d, H, Hk: {n: rng.standard_normal((2, L, H if n == "q" else Hk, d)) for n in "qkv"}
  # Head size 64; "full window" has larger heads, which have other tiles, and grouped queries.
  arrays = heads(min(d, 64), 2, 2)
  ids = np.cumsum(rng.random((2, L)) < 4 / L, axis=1).astype(np.int32)
  attend = lambda implementation, **more: (
    lambda **x: (causal_attention(**x, implementation=implementation, **more),)
  )
  window = max(L // 3, 1)
  segments = dict(segment_ids=ids)
  kinds = dict(plain=(None, arrays), window=(window, arrays), full=(None, arrays | segments))
  kinds["full window"] = (window, heads(d, 2, 1) | segments)
  for inputs, (window, given) in kinds.items():
    run, xla = attend(name, window=window, **options), attend("plain", window=window)
    yield DeviceCase(f"attention {name}", inputs, "bfloat16", given, run, xla, xla)


def _rope(name, sizes, options):
  """Rotary position embedding; TPU only."""
  if name != "pallas_tpu":
    return
  rng = np.random.default_rng(0)
  x = rng.standard_normal((2, sizes.spec.L, 2, 64))
  # Small positions: in float32 the angle of position 4096 has an error of 1e-4.
  positions = rng.integers(0, 64, x.shape[:2]).astype(np.int32)
  by = lambda implementation, **more: (
    lambda x: (rope(x, positions, implementation=implementation, **more),)
  )
  for dtype in DTYPES:
    implementations = (by(name, **options), by("plain"), by("plain"))
    yield DeviceCase(f"rope {name}", "plain", dtype, dict(x=x), *implementations)


def rounded(case: DeviceCase) -> dict[str, jax.Array]:
  """The inputs in the dtype of the case, states in float32."""
  arrays = {("S0" if name == "S" else name): x for name, x in case.arrays.items()}
  found = testing.cast(arrays, case.dtype)
  return {("S" if "S" in case.arrays and name == "S0" else name): x for name, x in found.items()}


def program(case: DeviceCase, f: Callable) -> Callable[[dict], dict]:
  """Compile f: its outputs and, if the case has gradients, all gradients of random cotangents."""
  if not case.gradients:
    return jax.jit(lambda x: dict(zip(case.names, f(**x))))
  run = testing.with_gradients(f, case.names)
  return lambda x: run(x, testing.random_cotangents(f, x))


def reference(case: DeviceCase) -> dict[str, np.ndarray]:
  """Results of the reference in float64 on the host, from the rounded inputs."""
  with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
    inputs = {
      name: np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else np.asarray(x)
      for name, x in rounded(case).items()
    }
    return jax.tree.map(
      np.asarray, program(case, case.reference)(jax.tree.map(jnp.asarray, inputs))
    )
