"""Tokenize text into a corpus for training: shuffled documents in memory-mapped shards.

Input is a text file (.txt, .md or text without a suffix: one document), JSON lines or JSON (.jsonl,
.json: one document per object), plain or ending in .gz, .xz or .zst; a Parquet or Arrow file or a
folder written by `datasets.Dataset.save_to_disk` (one document per row; extra `parquet`); or a
folder of such files. --text_field names the JSON field or the column.
After an interruption the same command resumes; on a complete corpus it verifies the checksums.

  python -m experiments.prepare_data --output=results/austen --validation=0.1
  python -m experiments.prepare_data --input=FOLDER --output=FOLDER --tokenizer=mistral
  python -m experiments.prepare_data --input=FOLDER --output=FOLDER --tokenizer=FILE/tokenizer.json
  python -m experiments.prepare_data --input=FOLDER --validation_input=FILE --output=FOLDER
  python -m experiments.prepare_data --input='FINEWEB/*.parquet' --output=FOLDER --text_field=text
  python -m experiments.prepare_data --input=DATA/train --validation_input=DATA/test --output=FOLDER
"""

from experiments.lib import early_signals  # noqa: F401, before imports that take seconds

# isort: split
from absl import flags

from deltanet_jax.data import load_tokenizer, shipped_corpus
from deltanet_jax.data.corpus.prepare import prepare
from experiments.lib import app

_INPUT = flags.DEFINE_multi_string(
  "input", None, "File, folder or glob pattern, repeatable; the bundled novels by default."
)
_OUTPUT = flags.DEFINE_string("output", None, "Folder to write.", required=True)
_TOKENIZER = flags.DEFINE_string(
  "tokenizer",
  "bytes",
  "Tokenizer: bytes, mistral, or the path of a tokenizer.json or SentencePiece .model, which is"
  " copied to the output.",
)
_VALIDATION = flags.DEFINE_float(
  "validation",
  None,
  "Size of the validation split, as a fraction of the bytes, 0.01 by default; complete documents,"
  " of which one may be split between paragraphs.",
)
_VALIDATION_INPUT = flags.DEFINE_multi_string(
  "validation_input", None, "Like --input: use it as validation split instead of a fraction."
)
_EOS = flags.DEFINE_bool("eos", True, "Append eos to documents, so that a model learns to stop.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the shuffle.")
_SHARD_TOKENS = flags.DEFINE_integer("shard_tokens", 1 << 28, "Number of tokens per shard.")
_TEXT_FIELD = flags.DEFINE_string(
  "text_field", "text", "JSON field, or column of Parquet and Arrow files, that has the text."
)


def _single(paths: list[str] | None) -> str | list[str] | None:
  """A single path without its list: names in the manifest are then relative to it."""
  return paths[0] if paths and len(paths) == 1 else paths


def main():
  if _VALIDATION.value is not None and _VALIDATION_INPUT.value:
    raise ValueError("--validation and --validation_input exclude each other: set one of them.")
  fraction = 0.01 if _VALIDATION.value is None else _VALIDATION.value
  manifest = prepare(
    _single(_INPUT.value) or shipped_corpus(),
    _OUTPUT.value,
    load_tokenizer(_TOKENIZER.value),
    validation=_single(_VALIDATION_INPUT.value) or fraction,
    eos=_EOS.value,
    seed=_SEED.value,
    shard_tokens=_SHARD_TOKENS.value,
    text_field=_TEXT_FIELD.value,
  )
  for name, split in (("train", manifest.train), ("validation", manifest.validation)):
    print(
      f"{name}: {split.documents} documents, {split.tokens} tokens, {split.bytes} bytes of text, "
      f"{len(split.shards)} shards"
    )
  print(f"{manifest.dropped} empty documents dropped; all checksums of {_OUTPUT.value} are correct")


if __name__ == "__main__":
  app.run(main, expected=(ValueError, ImportError))
