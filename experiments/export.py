"""Export the weights of a run: as an orbax checkpoint, or as safetensors of the public library.

  python -m experiments.export --workdir=results/lm --output=results/weights
  python -m experiments.export --workdir=results/lm --output=results/fla --format=safetensors

`deltanet_jax.load_trained` reads the first; orbax alone reads it as a dictionary of arrays.
`deltanet_jax.load_fla` and the PyTorch library flash-linear-attention read the second, which
supports DeltaNet and Gated DeltaNet, with or without attention in some of the layers.
"""

from experiments.lib import early_signals  # noqa: F401, before imports that take seconds

# isort: split
from absl import flags

from deltanet_jax.data import load_tokenizer
from deltanet_jax.interop import save_fla
from deltanet_jax.train import load_trained, save_weights
from experiments.lib import app, import_flag

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "Folder to write, new or empty.", required=True)
_STEP = flags.DEFINE_integer(
  "step", None, "Step of the checkpoint; the latest complete one by default."
)
_FORMAT = flags.DEFINE_enum("format", "orbax", ["orbax", "safetensors"], "Format of the weights.")


def main():
  import_flag.import_modules()
  trained = load_trained(_WORKDIR.value, _STEP.value)
  if _FORMAT.value == "orbax":
    save_weights(trained, _OUTPUT.value)
  else:
    name = trained.tokenizer
    extra_files = {} if name is None else load_tokenizer(name, trained.folder).files()
    save_fla(trained.model, _OUTPUT.value, extra_files=extra_files)
  print(f"wrote the model after step {trained.step} to {_OUTPUT.value}")


if __name__ == "__main__":
  app.run(main, expected=(ValueError, OSError))
