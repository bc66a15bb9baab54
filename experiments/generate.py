"""Continues prompts with a trained run, a public checkpoint, or a preset of random weights.

  python -m experiments.generate --workdir=results/demo/run --text="It is a truth " \\
    --temperature=0.8 --top_k=9
  python -m experiments.generate --checkpoint=FOLDER --tokenizer=mistral --text="The capital of"
  python -m experiments.generate --checkpoint=FOLDER --tokenizer=FILE/tokenizer.json --text="One "
  python -m experiments.generate --checkpoint=fla-hub/delta_net-1.3B-100B --text="The capital of"
  python -m experiments.generate --checkpoint=FOLDER --prompt=1,450,4996 --max_new=64
  python -m experiments.generate --preset=deltanet-tiny --prompt=5,9 --prompt=7 --temperature=0.8

`--text` is encoded (and begun with bos) and the answer decoded, up to eos; `--prompt` is token ids,
and so is the answer. Either may be repeated: a batch of unequal prompts. `--text_file` and
`--prompt_file` read prompts from files or, as `-`, from standard input:

  echo "It is a truth" | python -m experiments.generate --workdir=results/demo/run --text_file=-
  python -m experiments.generate --workdir=results/demo/run --text_file=prompts.txt --lines
"""

import time

from absl import flags

from deltanet_jax.data import Tokenizer, find_tokenizer, load_tokenizer, vocabulary_mismatch
from deltanet_jax.generate import Sampling, generate
from deltanet_jax.interop import checkpoint_folder, load_fla
from deltanet_jax.models import LM, PRESETS, build, preset
from deltanet_jax.train import load_trained
from experiments.lib import app, prompts

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run, or of exported weights.")
_STEP = flags.DEFINE_integer("step", None, "Which checkpoint of a run; the newest whole one.")
_CHECKPOINT = flags.DEFINE_string(
  "checkpoint", None, "Folder with config.json and safetensors, or owner/name on the hub."
)
_PRESET = flags.DEFINE_enum("preset", "deltanet-tiny", PRESETS, "Model without either.")
_TEXTS = flags.DEFINE_multi_string("text", [], "Prompt as text; repeat for more rows.")
_PROMPTS = flags.DEFINE_multi_string("prompt", [], "Prompt as token ids with commas; likewise.")
_TOKENIZER = flags.DEFINE_string(
  "tokenizer",
  None,
  "How --text becomes tokens: bytes, mistral, or the path of a tokenizer.json or SentencePiece"
  " .model. A run knows it by itself, and a checkpoint with such a file in its folder.",
)
_MAX_NEW = flags.DEFINE_integer("max_new", 200, "Tokens to add at most.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 takes the most likely.", lower_bound=0.0)
_TOP_K = flags.DEFINE_integer(
  "top_k", None, "Only the k most likely tokens; needs a temperature.", lower_bound=1
)
_TOP_P = flags.DEFINE_float("top_p", None, "Only tokens that hold this much probability; likewise.")
_STOP = flags.DEFINE_multi_integer(
  "stop", [], "Token id that ends a row; with --text eos does by default."
)
_SEED = flags.DEFINE_integer("seed", 0, "Of the sampling.")


def _texts() -> list[str]:
  return [*_TEXTS.value, *prompts.texts()]


def _token_ids() -> list[str]:
  return [*_PROMPTS.value, *prompts.token_ids()]


def load() -> tuple[LM, Tokenizer | None]:
  """The model that the flags name, and its tokenizer where there is text and one is known."""
  if _WORKDIR.value and _CHECKPOINT.value:
    raise ValueError("--workdir and --checkpoint are two models: give one.")
  if _WORKDIR.value:
    trained = load_trained(_WORKDIR.value, _STEP.value)
    tokenizer = None
    if trained.tokenizer and _texts():
      tokenizer = load_tokenizer(trained.tokenizer, _WORKDIR.value)
    if _TOKENIZER.value and tokenizer and load_tokenizer(_TOKENIZER.value).hash != tokenizer.hash:
      raise ValueError(
        f"{_WORKDIR.value} was trained on the tokenizer {tokenizer.name!r}: leave --tokenizer out."
      )
    if tokenizer and tokenizer.vocab > trained.model.cfg.vocab:
      raise ValueError(
        f"{_WORKDIR.value} has a vocabulary of {trained.model.cfg.vocab}, but {tokenizer.name!r}"
        f" now has {tokenizer.vocab} ids: train it again, or give ids by --prompt."
      )
    return trained.model, tokenizer
  if _STEP.value is not None:
    raise ValueError("--step is of a run, --workdir; a checkpoint or a preset has one model.")
  folder = checkpoint_folder(_CHECKPOINT.value) if _CHECKPOINT.value else None
  model = load_fla(folder) if folder else build(preset(_PRESET.value))
  name = _TOKENIZER.value or (folder and find_tokenizer(folder))
  if not _texts() or not name:
    return model, None
  tokenizer = load_tokenizer(name)
  if odd := vocabulary_mismatch(tokenizer.vocab, model.cfg.vocab):
    raise ValueError(f"{odd}: --tokenizer={name} is not what made its tokens.")
  return model, tokenizer


def check_flags():
  """Refuses what can be refused before a model is loaded."""
  if bool(_texts()) == bool(_token_ids()):
    raise ValueError(
      "give --text (or --text_file) or --prompt (or --prompt_file), once or several times; see"
      " --help."
    )
  if _texts() and not (_WORKDIR.value or _CHECKPOINT.value or _TOKENIZER.value):
    raise ValueError(
      "--text needs a trained model: --workdir=RUN (`python -m experiments.demo` trains one in"
      " minutes, in results/demo/run) or --checkpoint=FOLDER; a preset of random weights takes"
      " token ids, --prompt=5,9."
    )


def ids(prompt: str) -> list[int]:
  try:
    return [int(token) for token in prompt.split(",")]
  except ValueError:
    raise ValueError(
      f"--prompt is {prompt!r}, expected token ids as 5,9,2; text is --text."
    ) from None


def main():
  check_flags()
  how = Sampling(temperature=_TEMPERATURE.value, top_k=_TOP_K.value, top_p=_TOP_P.value)
  how.validate()
  stop, encoded = _STOP.value, [ids(prompt) for prompt in _token_ids()]
  model, tokenizer = load()
  if _texts():
    if tokenizer is None:
      raise ValueError(
        "nothing says how this model's tokens are made: set --tokenizer, or give ids by --prompt."
      )
    encoded = [[tokenizer.bos, *tokenizer.encode(text).tolist()] for text in _texts()]
    stop = stop or [tokenizer.eos] * (tokenizer.eos is not None)
  start = time.perf_counter()
  rows = generate(model, encoded, _MAX_NEW.value, sampling=how, stop=stop, seed=_SEED.value)
  seconds = time.perf_counter() - start
  for prompt, row in zip(encoded, rows):
    if tokenizer:
      print(tokenizer.decode([*prompt, *row]))
    else:
      print(f"{prompt} -> {row}")
  print(f"{sum(map(len, rows))} tokens in {seconds:.1f} s, compilation included")


if __name__ == "__main__":
  app.run(main, expected=(ValueError, ImportError, OSError))
