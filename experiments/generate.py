"""Continues prompts with a trained run, a public checkpoint, or a preset of random weights.

  python -m experiments.generate --workdir=results/demo/run --text="It is a truth " \\
    --temperature=0.8 --top_k=9
  python -m experiments.generate --checkpoint=FOLDER --tokenizer=mistral --text="The capital of"
  python -m experiments.generate --checkpoint=FOLDER --prompt=1,450,4996 --max_new=64
  python -m experiments.generate --preset=deltanet-tiny --prompt=5,9 --prompt=7 --temperature=0.8

`--text` is encoded (and begun with bos) and the answer decoded; `--prompt` is token ids. Either may
be repeated: a batch of unequal prompts.
"""

import time

from absl import flags

from deltanet_jax.data import TOKENIZERS, load_tokenizer
from deltanet_jax.generate import Sampling, generate
from deltanet_jax.interop import load_fla
from deltanet_jax.models import LM, PRESETS, build, preset
from deltanet_jax.train import load_trained
from experiments.lib import app

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run, or of exported weights.")
_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Folder with config.json and safetensors.")
_PRESET = flags.DEFINE_enum("preset", "deltanet-tiny", PRESETS, "Model without either.")
_TEXTS = flags.DEFINE_multi_string("text", [], "Prompt as text; repeat for more rows.")
_PROMPTS = flags.DEFINE_multi_string("prompt", [], "Prompt as token ids with commas; likewise.")
_TOKENIZER = flags.DEFINE_enum(
  "tokenizer", None, TOKENIZERS, "How --text becomes tokens; a run knows it by itself."
)
_MAX_NEW = flags.DEFINE_integer("max_new", 200, "Tokens to add at most.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy.", lower_bound=0.0)
_TOP_K = flags.DEFINE_integer("top_k", None, "Only the k most likely tokens.", lower_bound=1)
_TOP_P = flags.DEFINE_float("top_p", None, "Only tokens that hold this much probability.")
_STOP = flags.DEFINE_multi_integer("stop", [], "Token id that ends a row.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the sampling.")


def load() -> tuple[LM, str | None]:
  """The model that the flags name, and the name of its tokenizer where one is known."""
  if _WORKDIR.value and _CHECKPOINT.value:
    raise ValueError("--workdir and --checkpoint are two models: give one.")
  if _CHECKPOINT.value:
    return load_fla(_CHECKPOINT.value), _TOKENIZER.value
  if not _WORKDIR.value:
    return build(preset(_PRESET.value)), _TOKENIZER.value
  trained = load_trained(_WORKDIR.value)
  if _TOKENIZER.value not in (None, trained.tokenizer):
    raise ValueError(
      f"{_WORKDIR.value} was trained on the tokenizer {trained.tokenizer!r}: leave --tokenizer out."
    )
  return trained.model, trained.tokenizer


def main():
  if bool(_TEXTS.value) == bool(_PROMPTS.value):
    raise ValueError("give --text or --prompt, one or several times; see --help.")
  how = Sampling(temperature=_TEMPERATURE.value, top_k=_TOP_K.value, top_p=_TOP_P.value)
  stop, tokenizer = _STOP.value, None
  model, name = load()
  prompts = [[int(token) for token in prompt.split(",")] for prompt in _PROMPTS.value]
  if _TEXTS.value:
    if name is None:
      raise ValueError("nothing says how this model's tokens are made: set --tokenizer.")
    tokenizer = load_tokenizer(name)
    prompts = [[tokenizer.bos, *tokenizer.encode(text).tolist()] for text in _TEXTS.value]
    # A model of documents ends one by beginning the next.
    stop = stop or [tokenizer.bos]
  start = time.perf_counter()
  rows = generate(model, prompts, _MAX_NEW.value, sampling=how, stop=stop, seed=_SEED.value)
  seconds = time.perf_counter() - start
  for prompt, row in zip(prompts, rows):
    if tokenizer:
      print(tokenizer.decode([*prompt, *row]))
    else:
      print(f"{prompt} -> {row}")
  print(f"{sum(map(len, rows))} tokens in {seconds:.1f} s, compilation included")


if __name__ == "__main__":
  app.run(main, expected=(ValueError, FileNotFoundError, ImportError))
