"""Public functions of the delta rule: argument checks and dispatch."""

from jaxtyping import Array, Float, Int

from deltanet_jax.ops.checks import (
  check_chunk,
  check_floating,
  check_gate,
  check_inputs,
  check_qk,
  check_segment_ids,
  check_token,
)
from deltanet_jax.ops.delta_rule import parallel
from deltanet_jax.ops.delta_rule.implementations import DELTA_RULE, Options
from deltanet_jax.ops.dtypes import matmul_precision_for, state_dtype
from deltanet_jax.ops.inputs import cast_all, scaled_heads
from deltanet_jax.ops.layer_state import LayerState
from deltanet_jax.ops.segments import number_segments


def delta_rule(
  q: Float[Array, "B L H dk"],
  k: Float[Array, "B L H dk"],
  v: Float[Array, "B L Hv dv"],
  beta: Float[Array, "B L Hv"],
  *,
  g: Float[Array, "B L Hv"] | Float[Array, "B L Hv dk"] | None = None,
  S0: Float[Array, "B Hv dk dv"] | None = None,
  segment_ids: Int[Array, "B L"] | None = None,
  scale: float = 1.0,
  chunk: int | None = None,
  implementation: str | None = None,
  inverse_precision: str | None = None,
  interpret: bool = False,
) -> tuple[Float[Array, "B L Hv dv"], Float[Array, "B Hv dk dv"]]:
  """Apply the (gated) delta rule to a sequence.

  S_t = S' + k_t (x) beta_t (v_t - k_t S'), S' = exp(g_t) S_{t-1}; o_t = scale q_t S_t.

  Keys should have norm 1 and beta should be in (0, 1), or in (0, 2) to allow negative eigenvalues;
  nothing is normalized here. q, k, v, beta, g and S0 are differentiable, in reverse mode to any
  order. Forward mode (`jax.jvp`) needs implementation "recurrent" or "parallel".

  Args:
    q: Queries.
    k: Keys.
    v: Values. Hv is a multiple of H; value head j uses key head j // (Hv / H).
    beta: Step size (learning rate) of each token's update.
    g: Log decay (<= 0): a per-head (scalar) gate or a per-channel (vector) gate; None for no decay.
    S0: State before the first token, zeros if None.
    segment_ids: Segments of packed sequences. The state is reset to zero wherever the id changes;
      S0 belongs to the first segment of a sequence, the returned S to the last.
    scale: Factor of the queries, usually dk**-0.5.
    chunk: Maximum chunk size, a power of two. None is the implementation's best: in plain JAX 32
      for head sizes up to 128 and 64 above, 64 on GPU, 128 on TPU.
    implementation: "recurrent" (scan over tokens), "chunkwise" (scan over chunks, matmuls inside),
      "parallel" (L x L matrices), "pallas_tpu" or "pallas_gpu" (fused kernels), "triton" (the
      paper's kernel through jax-triton). A named implementation runs or raises. None selects the
      fastest one that the target platform (see `compiling_for`) has for these inputs.
    inverse_precision: Matmul precision of a kernel inside (I + A)^-1: "bf16", "bf16x3", "bf16x6" or
      "substitution"; None is exact to float32 for float32 inputs. Plain JAX is always exact.
    interpret: Run a Pallas kernel in interpret mode on the CPU.

  Returns:
    o in v's dtype, and the last state S in float32 (float64 for float64 inputs).

  Raises:
    ValueError: if shapes or dtypes are wrong, or the named implementation is unknown or does not
      support the inputs.
  """
  check_inputs(q, k, v, beta=beta, g=g, S0=S0, segment_ids=segment_ids)
  check_chunk(chunk)
  inputs = (q, k, v, beta, g, S0)
  entry = DELTA_RULE.resolve(implementation, *inputs, interpret=interpret)
  # A named "chunkwise" computes in chunks; as the default it may scan over tokens where faster.
  primal = "fastest" if implementation is None and chunk is None else "chunks"
  options = Options(float(scale), chunk, inverse_precision, interpret, primal)
  return entry.run(*DELTA_RULE.guard_forward_mode(entry, inputs), segment_ids, options)


def delta_rule_step(
  q_t: Float[Array, "B H dk"],
  k_t: Float[Array, "B H dk"],
  v_t: Float[Array, "B Hv dv"],
  beta_t: Float[Array, "B Hv"],
  S: Float[Array, "B Hv dk dv"] | LayerState,
  g_t: Float[Array, "B Hv"] | Float[Array, "B Hv dk"] | None = None,
  *,
  scale: float = 1.0,
  implementation: str | None = None,
  interpret: bool = False,
) -> tuple[Float[Array, "B Hv dv"], Float[Array, "B Hv dk dv"] | LayerState]:
  """Apply the delta rule to one decoding token, starting from state S.

  Args:
    q_t: Query. The other token arguments are as in `delta_rule`, without the length axis.
    k_t: Key.
    v_t: Value.
    beta_t: Step size.
    S: The state, or the `LayerState` of one layer in a stack of states.
    g_t: Log decay.
    scale: Factor of the query.
    implementation: As in `delta_rule`. All plain implementations share one differentiable step in
      JAX. A kernel's step is for decoding only and reads and writes the state once.
    interpret: Run a Pallas kernel in interpret mode on the CPU.

  Returns:
    o_t, and the new state as the same type as S.
  """
  check_token(q_t, k_t, v_t)
  token = (q_t, k_t, v_t, beta_t)
  entry = DELTA_RULE.resolve(implementation, *token, g_t, S, interpret=interpret)
  return entry.step(token, S, g_t, float(scale), interpret)


def delta_rule_attention(
  q: Float[Array, "B L H dk"],
  k: Float[Array, "B L H dk"],
  beta: Float[Array, "B L Hv"],
  *,
  g: Float[Array, "B L Hv"] | Float[Array, "B L Hv dk"] | None = None,
  segment_ids: Int[Array, "B L"] | None = None,
  scale: float = 1.0,
) -> Float[Array, "B Hv L L"]:
  """Return the L x L attention matrix A of the parallel form: o = A v for a zero initial state.

  Args:
    q: Queries. All arguments are as in `delta_rule`.
    k: Keys.
    beta: Step sizes.
    g: Log decay.
    segment_ids: Segments of packed sequences.
    scale: Factor of the queries.
  """
  check_qk(q, k)
  B, L, H, dk = q.shape
  if beta.ndim != 3 or beta.shape[:2] != (B, L) or beta.shape[2] % H or beta.shape[2] == 0:
    raise ValueError(
      f"beta has shape {beta.shape}, expected [B, L, Hv] = [{B}, {L}, a multiple of {H}]."
    )
  Hv = beta.shape[2]
  check_gate(g, (B, L, Hv, dk))
  check_floating(q=q, k=k, beta=beta, g=g)
  check_segment_ids(segment_ids, (B, L))
  dtype = state_dtype(q, k, beta, g)
  q, k = scaled_heads(q, k, scale, Hv, dtype)
  with matmul_precision_for(k.dtype):
    return parallel.attention(q, k, *cast_all(dtype, beta, g), number_segments(segment_ids))
