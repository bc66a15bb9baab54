"""Cases of `kernel_report`: which kernels are compiled, at which shapes and with which inputs."""

import dataclasses

from deltanet_jax.chips import CHIPS
from pallas_kernels.attention.checks import MAX_HEAD_SIZE

HEADS = 16  # default number of heads
# Platform -> program -> the kernels that it launches and the report lists.
PROGRAMS = {
  "tpu": {
    "forward": ("delta_rule_fwd",),
    "forward with residuals": ("delta_rule_fwd",),
    "backward": ("delta_rule_bwd",),
    "step": ("delta_rule_step",),
    "linear attention forward": ("linear_attention_fwd",),
    "linear attention forward with residuals": ("linear_attention_fwd",),
    "linear attention backward": ("linear_attention_bwd",),
    "linear attention step": ("linear_attention_step",),
    "short conv forward": ("short_conv_fwd",),
    "short conv backward": ("short_conv_bwd",),
    "attention forward": ("attention_fwd",),
    "attention backward": ("attention_bwd",),
    "rope": ("rope",),
  },
  "gpu": {
    "forward": ("delta_rule_intra", "delta_rule_fwd"),
    "backward": ("delta_rule_states", "delta_rule_dstates", "delta_rule_grads"),
    "UT forward": ("delta_rule_ut_fwd",),
    "UT backward": ("delta_rule_ut_bwd",),
    "UT jax-triton": ("_ut_kernel",),
    "step": ("delta_rule_step",),
    "linear attention forward": ("linear_attention_scores", "linear_attention_fwd"),
    "linear attention backward": (
      "linear_attention_states", "linear_attention_dstates", "linear_attention_grads",
    ),
    "linear attention step": ("linear_attention_step",),
    "short conv forward": ("short_conv_fwd",),
    "short conv backward": ("short_conv_bwd",),
    "attention forward": ("attention_fwd",),
    "attention backward": ("attention_bwd",),
    "qkv conv forward": ("short_conv_fwd",),
    "qkv conv backward": ("short_conv_bwd",),
    "head norm forward": ("head_norm_fwd",),
    "head norm backward": ("head_norm_bwd",),
  },
}  # fmt: skip
# Additional kernels of a program with per-channel gates.
PER_CHANNEL_KERNELS = {
  "tpu": {},
  "gpu": {
    "backward": ("delta_rule_scores", "delta_rule_dscores"),
    "linear attention backward": ("linear_attention_scores", "linear_attention_dscores"),
  },
}
CHUNKS = {"tpu": 128, "gpu": 64}  # default chunk sizes of the kernels
INPUTS = ("plain", "segments", "full", "per_channel", "per_channel_full")


@dataclasses.dataclass(frozen=True)
class KernelCase:
  """One program at one shape.

  `inputs` of the delta rule and linear attention (which has no beta):
    plain: q, k, v, beta.
    segments: plain and segment_ids.
    full: plain, a per-head (scalar) gate g, S0 and segment_ids.
    per_channel: plain and a per-channel (vector) gate g.
    per_channel_full: full with a per-channel gate.

  Short convolutions have 4 taps, silu and an L2 norm per head; a "qkv conv" is the fused
  convolution of q, k and v, whose input has one more column per head (beta). "full" adds
  segment_ids to convolutions and attention, and an output gate to the per-head norm.
  """

  program: str
  dtype: str
  head_size: int  # dk
  value_size: int  # dv
  chunk: int | None
  inputs: str
  heads: int = HEADS

  @property
  def is_linear_attention(self) -> bool:
    return self.program.startswith("linear attention")

  @property
  def is_auxiliary(self) -> bool:
    """A kernel other than the delta rule and linear attention: no chunks, no decay gates."""
    return self.program.startswith(("short conv", "qkv conv", "head norm", "attention", "rope"))

  @property
  def per_channel(self) -> bool:
    return self.inputs in ("per_channel", "per_channel_full")

  @property
  def direction(self) -> str:
    """ "forward", "forward with residuals", "backward" or "step"."""
    return self.program.removeprefix("linear attention ")

  def supported(self, target: str) -> bool:
    """Whether a kernel exists for this case.

    Auxiliary kernels have no decay gates, the stand-alone UT transform no per-channel ones.
    Attention supports bfloat16 only, rope no segments.
    """
    if self.program.startswith("attention"):
      largest = MAX_HEAD_SIZE[f"pallas_{CHIPS[target].platform}"]
      if self.dtype != "bfloat16" or self.head_size > largest:
        return False
    if self.inputs != "plain" and (
      self.program == "rope" or (self.is_auxiliary and self.inputs != "full")
    ):
      return False
    return not (self.per_channel and (self.is_auxiliary or self.program.startswith("UT")))

  def with_supported_chunk(self, target: str) -> "KernelCase":
    """The same case with the chunk size that the kernel uses; None for kernels without chunks."""
    chunk = self.chunk
    if self.direction == "step" or self.is_auxiliary:
      chunk = None
    elif CHIPS[target].platform == "gpu":
      from pallas_kernels.delta_rule.pallas_gpu import tiles

      chunk = tiles.clamp_chunk(chunk, self.dtype)
    return dataclasses.replace(self, chunk=chunk)


def record_keys(target: str, case: KernelCase) -> list[dict]:
  """Record key of each kernel of the case; `heads` only if it is not the default."""
  named = dataclasses.asdict(case)
  if case.heads == HEADS:
    del named["heads"]
  kernels = PROGRAMS[CHIPS[target].platform][case.program]
  gated = case.inputs not in ("plain", "segments")
  if target == "h100" and case.dtype == "bfloat16" and case.head_size <= 128 and not gated:
    # `tiles.scores_in_place` fuses it into its consumers; the delta rule still needs its inverse.
    kernels = [x for x in kernels if x != "linear_attention_scores"]
  if case.per_channel:
    kernels = [*kernels, *PER_CHANNEL_KERNELS[CHIPS[target].platform].get(case.program, ())]
  return [dict(target=target, **named, kernel=kernel) for kernel in kernels]
