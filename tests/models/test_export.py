"""A model as a file that needs neither this library nor its weights: jax.export."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from deltanet_jax.models import preset
from deltanet_jax.ops.testing import rel_rms
from tests.support.models import random_model

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 11, (3, 6)), jnp.int32)


def exported(family, rows, **changes):
  options = dict(vocab=11, width=8, depth=2, mlp_multiple=8)
  model = random_model(preset(f"{family}-tiny", **options | changes))
  (B,) = export.symbolic_shape(rows)
  shape = jax.ShapeDtypeStruct((B, TOKENS.shape[1]), jnp.int32)
  program = export.export(jax.jit(lambda tokens: model(tokens)))(shape)
  return export.deserialize(program.serialize()), model


def test_serialised_model_gives_the_same_logits():
  program, model = exported("deltanet-sliding", "3")
  assert rel_rms(program.call(TOKENS), model(TOKENS)) < 1e-6


def test_any_number_of_rows():
  """The delta rule cuts rows into groups, but not as a recurrence."""
  program, model = exported("deltanet", "B", implementation="recurrent")
  want = model(TOKENS)
  for B in (1, 3):
    assert rel_rms(program.call(TOKENS[:B]), want[:B]) < 1e-6
