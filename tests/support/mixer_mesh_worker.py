"""Compare sharded mixers with one device on 4 simulated devices; print one JSON line per mixer.

Run as a subprocess by tests/mixers/test_mesh.py.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from deltanet_jax.sharding import make_mesh, named
from tests.support.mixers import CASES, draw_mixer

jax.config.update("jax_enable_x64", True)
IDS = jnp.asarray([[1] * 5 + [2] * 3, [1] * 8], jnp.int32)
MESHES = (
  dict(data=2, fsdp=1, tensor=2, sequence=1),
  dict(data=1, fsdp=2, tensor=1, sequence=2),
)


@jax.jit
def value_and_gradients(mixer, x):
  return jax.value_and_grad(lambda mixer, x: (mixer(x, IDS) ** 2).sum(), argnums=(0, 1))(mixer, x)


def sharded(mixer, mesh):
  """The mixer with its weights sharded over the mesh."""
  one = lambda w: w.replace(jax.device_put(w[...], named(mesh, *w.axes)))
  return jax.tree.map(one, mixer, is_leaf=lambda w: isinstance(w, nnx.Variable))


def difference(got, want):
  return float(np.abs(np.asarray(got) - np.asarray(want)).max() / np.abs(np.asarray(want)).max())


for name in sys.argv[1:]:
  mixer, x = draw_mixer(CASES[name])
  x = x[:, : IDS.shape[1]]
  want, errors = value_and_gradients(mixer, x), []
  for sizes in MESHES:
    mesh = make_mesh(sizes)
    with jax.set_mesh(mesh):
      tokens = jax.device_put(x, named(mesh, "batch", "length", None))
      got = value_and_gradients(sharded(mixer, mesh), tokens)
    errors += jax.tree.leaves(jax.tree.map(difference, got, want))
  print(json.dumps(dict(name=name, error=max(errors))), flush=True)
