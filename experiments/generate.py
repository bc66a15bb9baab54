"""Generate text from prompts with a trained run, a public checkpoint, or a random preset.

  python -m experiments.generate --workdir=results/demo/run --text="It is a truth " \\
    --temperature=0.8 --top_k=9
  python -m experiments.generate --checkpoint=FOLDER --tokenizer=mistral --text="The capital of"
  python -m experiments.generate --checkpoint=FOLDER --tokenizer=FILE/tokenizer.json --text="One "
  python -m experiments.generate --checkpoint=fla-hub/delta_net-1.3B-100B --text="The capital of"
  python -m experiments.generate --checkpoint=FOLDER --prompt=1,450,4996 --max_new=64
  python -m experiments.generate --preset=deltanet-tiny --prompt=5,9 --prompt=7 --temperature=0.8

`--text` is encoded with bos in front, and the output is decoded up to eos; `--prompt` is token ids,
and so is the output. Repeat either for a batch of prompts, which may differ in length.
`--text_file` and `--prompt_file` read prompts from files or, as `-`, from standard input:

  echo "It is a truth" | python -m experiments.generate --workdir=results/demo/run --text_file=-
  python -m experiments.generate --workdir=results/demo/run --text_file=prompts.txt --lines
"""

from experiments.lib import early_signals  # noqa: F401, before imports that take seconds

# isort: split
import time

from absl import flags

from deltanet_jax.data import Tokenizer, find_tokenizer, load_tokenizer, vocabulary_mismatch
from deltanet_jax.generate import Sampling, generate
from deltanet_jax.interop import checkpoint_folder, load_fla
from deltanet_jax.models import LM, PRESETS, build, preset
from deltanet_jax.train import load_trained
from experiments.lib import app, import_flag, prompts

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run, or of exported weights.")
_STEP = flags.DEFINE_integer(
  "step", None, "Step of the checkpoint; the latest complete one by default."
)
_CHECKPOINT = flags.DEFINE_string(
  "checkpoint", None, "Folder with config.json and safetensors, or owner/name on the hub."
)
_PRESET = flags.DEFINE_enum(
  "preset",
  "deltanet-tiny",
  PRESETS,
  "Model with random weights, without --workdir and --checkpoint.",
)
_TEXTS = flags.DEFINE_multi_string("text", [], "Prompt as text; repeatable.")
_PROMPTS = flags.DEFINE_multi_string("prompt", [], "Prompt as token ids, 5,9,2; repeatable.")
_TOKENIZER = flags.DEFINE_string(
  "tokenizer",
  None,
  "Tokenizer of --text: bytes, mistral, or the path of a tokenizer.json or SentencePiece .model. By"
  " default that of the run, or of the checkpoint folder.",
)
_MAX_NEW = flags.DEFINE_integer("max_new", 200, "Maximum number of new tokens.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float(
  "temperature", 0.0, "Sampling temperature; 0 is greedy (argmax).", lower_bound=0.0
)
_TOP_K = flags.DEFINE_integer(
  "top_k", None, "Sample from the k most likely tokens; needs a temperature.", lower_bound=1
)
_TOP_P = flags.DEFINE_float(
  "top_p", None, "Nucleus sampling: sample from the tokens of this probability mass; likewise."
)
_STOP = flags.DEFINE_multi_integer(
  "stop", [], "Token id that ends a sequence; with --text eos by default."
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the sampling.")


def _texts() -> list[str]:
  return [*_TEXTS.value, *prompts.texts()]


def _token_ids() -> list[str]:
  return [*_PROMPTS.value, *prompts.token_ids()]


def load() -> tuple[LM, Tokenizer | None]:
  """The model that the flags select, and its tokenizer if --text is set and one is known."""
  if _WORKDIR.value and _CHECKPOINT.value:
    raise ValueError("--workdir and --checkpoint exclude each other: set one of them.")
  if _WORKDIR.value:
    trained = load_trained(_WORKDIR.value, _STEP.value)
    tokenizer = None
    if trained.tokenizer and _texts():
      tokenizer = load_tokenizer(trained.tokenizer, _WORKDIR.value)
    if _TOKENIZER.value and tokenizer and load_tokenizer(_TOKENIZER.value).hash != tokenizer.hash:
      raise ValueError(
        f"{_WORKDIR.value} was trained with the tokenizer {tokenizer.name!r}: remove --tokenizer."
      )
    if tokenizer and tokenizer.vocab > trained.model.cfg.vocab:
      raise ValueError(
        f"{_WORKDIR.value} has a vocabulary of {trained.model.cfg.vocab}, but {tokenizer.name!r}"
        f" now has {tokenizer.vocab} ids: train it again, or pass token ids with --prompt."
      )
    return trained.model, tokenizer
  if _STEP.value is not None:
    raise ValueError("--step needs --workdir: a checkpoint or a preset has no steps.")
  folder = checkpoint_folder(_CHECKPOINT.value) if _CHECKPOINT.value else None
  model = load_fla(folder) if folder else build(preset(_PRESET.value))
  name = _TOKENIZER.value or (folder and find_tokenizer(folder))
  if not _texts() or not name:
    return model, None
  tokenizer = load_tokenizer(name)
  if odd := vocabulary_mismatch(tokenizer.vocab, model.cfg.vocab):
    raise ValueError(f"{odd}: --tokenizer={name} is not the tokenizer of this model.")
  return model, tokenizer


def check_flags():
  """Check flags before a model is loaded."""
  if bool(_texts()) == bool(_token_ids()):
    raise ValueError("set either --text or --prompt (or --text_file, --prompt_file); see --help.")
  if _texts() and not (_WORKDIR.value or _CHECKPOINT.value or _TOKENIZER.value):
    raise ValueError(
      "--text needs a trained model: --workdir=RUN (`python -m experiments.demo` trains one in"
      " minutes, in results/demo/run) or --checkpoint=FOLDER; a preset of random weights takes"
      " token ids, --prompt=5,9."
    )


def ids(prompt: str) -> list[int]:
  """Parse token ids."""
  try:
    return [int(token) for token in prompt.split(",")]
  except ValueError:
    raise ValueError(
      f"--prompt is {prompt!r}, expected token ids like 5,9,2; for text use --text."
    ) from None


def main():
  import_flag.import_modules()
  check_flags()
  sampling = Sampling(temperature=_TEMPERATURE.value, top_k=_TOP_K.value, top_p=_TOP_P.value)
  sampling.validate()
  stop, encoded = _STOP.value, [ids(prompt) for prompt in _token_ids()]
  model, tokenizer = load()
  if _texts():
    if tokenizer is None:
      raise ValueError(
        "the tokenizer of this model is unknown: set --tokenizer, or pass token ids with --prompt."
      )
    encoded = [[tokenizer.bos, *tokenizer.encode(text).tolist()] for text in _texts()]
    stop = stop or [tokenizer.eos] * (tokenizer.eos is not None)
  start = time.perf_counter()
  generated = generate(
    model, encoded, _MAX_NEW.value, sampling=sampling, stop=stop, seed=_SEED.value
  )
  seconds = time.perf_counter() - start
  for prompt, tokens in zip(encoded, generated):
    if tokenizer:
      print(tokenizer.decode([*prompt, *tokens]))
    else:
      print(f"{prompt} -> {tokens}")
  print(f"{sum(map(len, generated))} tokens in {seconds:.1f} s, including compilation")


if __name__ == "__main__":
  app.run(main, expected=(ValueError, ImportError, OSError))
