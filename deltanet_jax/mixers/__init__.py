"""Token mixers: registry from a mixer's kind to its class, and construction from a config."""

from collections.abc import Iterable

from deltanet_jax import plugins
from deltanet_jax.config import MixerConfig, nearest
from deltanet_jax.mixers.abc_gsa import ABC, GSA
from deltanet_jax.mixers.attention import Attention
from deltanet_jax.mixers.base import ONLY_LAYER, Layer, Mixer
from deltanet_jax.mixers.block_deltanet import BlockDeltaNet
from deltanet_jax.mixers.deltanet import DeltaNet
from deltanet_jax.mixers.deltaproduct import DeltaProduct
from deltanet_jax.mixers.dfw import DFW
from deltanet_jax.mixers.gated_deltanet import GatedDeltaNet
from deltanet_jax.mixers.gated_rfa import GatedRFA
from deltanet_jax.mixers.gla import GLA
from deltanet_jax.mixers.hgrn2 import HGRN2
from deltanet_jax.mixers.hyena import Hyena, MultiheadHyena
from deltanet_jax.mixers.kda import KDA
from deltanet_jax.mixers.linear_attention import LinearAttention
from deltanet_jax.mixers.mamba import Mamba
from deltanet_jax.mixers.mamba2 import Mamba2
from deltanet_jax.mixers.mlstm import MLSTM
from deltanet_jax.mixers.retnet import RetNet
from deltanet_jax.mixers.rwkv4 import RWKV4
from deltanet_jax.mixers.rwkv6 import RWKV6
from deltanet_jax.mixers.rwkv7 import RWKV7
from deltanet_jax.mixers.s4d import S4D

# All mixers by `kind`. Other packages register theirs by `MIXERS["name"] = TheirMixer`, or by an
# entry point in the group `deltanet_jax.mixers`. Importing all modules takes 40 ms more than
# importing one, which already loads JAX, Flax and the operators.
MIXERS: dict[str, type[Mixer]] = {
  "abc": ABC,
  "attention": Attention,
  "block_deltanet": BlockDeltaNet,
  "deltanet": DeltaNet,
  "deltaproduct": DeltaProduct,
  "dfw": DFW,
  "gated_deltanet": GatedDeltaNet,
  "gated_rfa": GatedRFA,
  "gla": GLA,
  "gsa": GSA,
  "hgrn2": HGRN2,
  "hyena": Hyena,
  "kda": KDA,
  "linear_attention": LinearAttention,
  "mamba": Mamba,
  "mamba2": Mamba2,
  "mlstm": MLSTM,
  "multihead_hyena": MultiheadHyena,
  "retnet": RetNet,
  "rwkv4": RWKV4,
  "rwkv6": RWKV6,
  "rwkv7": RWKV7,
  "s4d": S4D,
}


_OWN = dict(MIXERS)  # the mixers of this package


def mixer_class(kind: str, path: str | None = None) -> type[Mixer]:
  """Mixer class registered under `kind`, or of the entry point of that name.

  Args:
    kind: of the mixer's config.
    path: `module:Class`, imported and registered if there is no mixer of that kind yet.

  Raises:
    ValueError: there is no mixer of that kind, or its module cannot be imported.
  """
  if kind not in MIXERS:
    found = _stored(kind, path) if path else _installed(kind)
    MIXERS.setdefault(kind, found)  # importing its module may have registered it
  return MIXERS[kind]


def _stored(kind: str, path: str) -> type[Mixer]:
  """The class that a config.json names."""
  module = path.rpartition(":")[0]
  if module == plugins.MAIN:
    raise ValueError(
      f"the mixer {kind!r} was defined in the script that trained it: move it to a module of its"
      " own and import that, in commands with --import=MODULE."
    )
  if "/" in module:  # code is executed by name only if it is on sys.path
    raise ValueError(
      f"the mixer {kind!r} is defined in the file {module}: import it, in commands with"
      f" --import={module}."
    )
  if kind in plugins.entry_points("mixers"):
    return _installed(kind)
  try:
    found = plugins.load(path)
  except ValueError as e:
    if kind in MIXERS:  # the module registered it, perhaps under another class name
      return MIXERS[kind]
    raise ValueError(
      f"the mixer {kind!r} of {path} cannot be imported ({str(e).rstrip('.')}); if it has moved,"
      " import its module, in commands with --import=MODULE."
    ) from e
  return _checked(kind, found, path)


def _installed(kind: str) -> type[Mixer]:
  """The class of the entry point `kind`."""
  points = plugins.entry_points("mixers")
  if kind not in points:
    known = {*MIXERS, *points}
    raise ValueError(
      f"mixer kind is {kind!r}{nearest(kind, known)}, expected one of {sorted(known)}, or import"
      " the module that registers it, in commands with --import=MODULE."
    )
  return _checked(kind, plugins.load_entry_point(points[kind]), points[kind].value)


def _checked(kind: str, found, path: str) -> type[Mixer]:
  if not (isinstance(found, type) and issubclass(found, Mixer)):
    raise ValueError(f"{path} is not a subclass of Mixer, expected the mixer {kind!r}.")
  return found


def register_installed():
  """Register the mixers of all entry points in the group `deltanet_jax.mixers`."""
  for kind in plugins.entry_points("mixers"):
    mixer_class(kind)


def import_paths(kinds: Iterable[str]) -> dict[str, str]:
  """Return `module:Class` by kind of the mixers that are not this package's own.

  Raises:
    ValueError: a kind of this package has been replaced by another class, so that a reader would
      build another model.
  """
  found = {}
  for kind in sorted(set(kinds)):
    mixer = mixer_class(kind)
    if mixer is _OWN.get(kind):
      continue
    if kind in _OWN:
      raise ValueError(
        f"{plugins.import_path(mixer)} replaces the package's own mixer {kind!r}: register it under"
        " another kind."
      )
    found[kind] = plugins.import_path(mixer)
  return found


def mixer_config(kind: str, path: str | None = None) -> type[MixerConfig]:
  """Config class of the mixer registered under `kind`; see `mixer_class`."""
  return mixer_class(kind, path).Config


def build_mixer(cfg: MixerConfig, width: int, *, layer: Layer = ONLY_LAYER, **options) -> Mixer:
  """Build the mixer that `cfg` describes.

  Args:
    cfg: hyperparameters; their `kind` selects the class.
    width: D, the size of the residual stream.
    layer: index in the model, for mixers whose initialization depends on it.
    options: `rngs`, and optionally `eps` of the norms and `std` of the initial weights.
  """
  mixer = mixer_class(cfg.kind)
  layer_option = dict(layer=layer) if mixer.by_layer else {}
  return mixer(cfg, width, **layer_option, **options)


__all__ = [
  "MIXERS",
  "Layer",
  "Mixer",
  "build_mixer",
  "import_paths",
  "mixer_class",
  "mixer_config",
  "register_installed",
]
