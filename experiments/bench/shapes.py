"""Shapes of the delta rule that `kernel_speed` times, in addition to `testing.SPEED`."""

from deltanet_jax.ops.testing import SPEED, Spec

# Batch size and heads, B H from 2 to 256; and one long sequence with few and many heads.
_BATCH_HEADS = ((1, 2), (1, 4), (2, 4), (4, 4), (8, 4), (16, 4), (16, 8), (16, 16))
BATCH_HEADS = {
  f"d{d}_B{B}_H{H}_L{L}": Spec(B=B, L=L, H=H, dk=d)
  for d in (64, 128)
  for B, H, L in (*((B, H, 512) for B, H in _BATCH_HEADS), (1, 4, 2048), (1, 16, 2048))
}
# Forward pass only: the paper's lengths, and shapes of prompts and validation batches.
FORWARD = SPEED | {
  f"d{d}_B{B}_H{H}_L{L}": Spec(B=B, L=L, H=H, dk=d)
  for d in (64, 128)
  for B, H, L in ((1, 4, 64), (1, 4, 256), (16, 4, 512), (16, 16, 512))
}
CURVES = {"length": SPEED, "forward": FORWARD, "batch_heads": BATCH_HEADS}
