"""Models exported by jax.export, which need neither this library nor its weights to run."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from deltanet_jax.models import preset
from deltanet_jax.ops.testing import rel_rms
from tests.support.models import random_model

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 11, (3, 6)), jnp.int32)


def exported(family, batch_size, **changes):
  options = dict(vocab=11, width=8, depth=2, mlp_multiple=8)
  model = random_model(preset(f"{family}-tiny", **options | changes))
  (B,) = export.symbolic_shape(batch_size)
  shape = jax.ShapeDtypeStruct((B, TOKENS.shape[1]), jnp.int32)
  program = export.export(jax.jit(lambda tokens: model(tokens)))(shape)
  return export.deserialize(program.serialize()), model


def test_exported_model_computes_the_same_logits():
  program, model = exported("deltanet-sliding", "3")
  assert rel_rms(program.call(TOKENS), model(TOKENS)) < 1e-6


def test_symbolic_batch_size():
  """Only the recurrent delta rule: the chunkwise form groups the batch by its concrete size."""
  program, model = exported("deltanet", "B", implementation="recurrent")
  want = model(TOKENS)
  for B in (1, 3):
    assert rel_rms(program.call(TOKENS[:B]), want[:B]) < 1e-6
