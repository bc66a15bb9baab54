"""Which kernels are compiled with which inputs: the cases of `kernel_report`."""

import dataclasses

from deltanet_jax.chips import CHIPS
from pallas_kernels.attention.checks import MAX_HEAD_SIZE

HEADS = 16  # of a training batch
# Program -> the kernels it reports, by platform.
PROGRAMS = {
  "tpu": {
    "forward": ("delta_rule_fwd",),
    "saving forward": ("delta_rule_fwd",),
    "backward": ("delta_rule_bwd",),
    "step": ("delta_rule_step",),
    "linear attention forward": ("linear_attention_fwd",),
    "linear attention saving forward": ("linear_attention_fwd",),
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
    "joint conv forward": ("short_conv_fwd",),
    "joint conv backward": ("short_conv_bwd",),
    "head norm forward": ("head_norm_fwd",),
    "head norm backward": ("head_norm_bwd",),
  },
}  # fmt: skip
# What gates of key channels add to them.
CHANNEL_KERNELS = {
  "tpu": {},
  "gpu": {
    "backward": ("delta_rule_scores", "delta_rule_dscores"),
    "linear attention backward": ("linear_attention_scores", "linear_attention_dscores"),
  },
}
CHUNKS = {"tpu": 128, "gpu": 64}  # what the kernels take unless told otherwise
INPUTS = ("plain", "documents", "full", "gates of channels", "channels")


@dataclasses.dataclass(frozen=True)
class KernelCase:
  """One program at one shape.

  inputs: "plain" is q, k, v, beta; "documents" adds segments, "full" g and S0 as well; "channels"
  has a g for each key channel in place of one for each head, "gates of channels" that g alone.
  Linear attention has no beta; a short convolution has four taps, silu and the L2 norm of heads, a
  joint one is of q, k and v and has a channel of each head beside them; they and attention are
  "full" with documents, the norm of an output's heads with a gate.
  """

  program: str
  dtype: str
  head_size: int  # dk
  value_size: int  # dv
  chunk: int | None
  inputs: str
  heads: int = HEADS

  @property
  def linear(self) -> bool:
    return self.program.startswith("linear attention")

  @property
  def around(self) -> bool:
    """A kernel around the rule, which has no chunks and no gates."""
    around = ("short conv", "joint conv", "head norm", "attention", "rope")
    return self.program.startswith(around)

  @property
  def channels(self) -> bool:
    return self.inputs in ("channels", "gates of channels")

  def served(self, target: str) -> bool:
    """Whether there is such a kernel.

    What is around the rule has no gates, and the UT transform alone has none of channels. Attention
    serves bfloat16; rotary positions know no documents.
    """
    if self.program.startswith("attention"):
      most = MAX_HEAD_SIZE[f"pallas_{CHIPS[target].platform}"]
      if self.dtype != "bfloat16" or self.head_size > most:
        return False
    if self.inputs != "plain" and (
      self.program == "rope" or (self.around and self.inputs != "full")
    ):
      return False
    return not (self.channels and (self.around or self.program.startswith("UT")))

  @property
  def part(self) -> str:
    """ "forward", "saving forward", "backward" or "step"."""
    return self.program.removeprefix("linear attention ")

  def normal(self, target: str) -> "KernelCase":
    """The same case with the chunk that the kernels take for it, None where there are none."""
    chunk = self.chunk
    if self.part == "step" or self.around:
      chunk = None
    elif CHIPS[target].platform == "gpu":
      from pallas_kernels.delta_rule.pallas_gpu import tiles

      chunk = tiles.clamp_chunk(chunk, self.dtype)
    return dataclasses.replace(self, chunk=chunk)


def keys(target: str, case: KernelCase) -> list[dict]:
  """What names each kernel of the case; its heads where they are not the training batch's."""
  named = dataclasses.asdict(case)
  if case.heads == HEADS:
    del named["heads"]
  kernels = PROGRAMS[CHIPS[target].platform][case.program]
  gated = case.inputs not in ("plain", "documents")
  if target == "h100" and case.dtype == "bfloat16" and case.head_size <= 128 and not gated:
    # What `tiles.scores_in_place` spares; the delta rule needs an inverse from there.
    kernels = [x for x in kernels if x != "linear_attention_scores"]
  if case.channels:
    kernels = [*kernels, *CHANNEL_KERNELS[CHIPS[target].platform].get(case.program, ())]
  return [dict(target=target, **named, kernel=kernel) for kernel in kernels]
