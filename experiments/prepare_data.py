"""Turns text into a corpus to train on: shuffled documents as tokens in memory-mapped shards.

Input is a text file (.txt, .md or text without a suffix: one document), JSON lines or JSON (.jsonl,
.json: one document an object), plain or ending in .gz, .xz or .zst; Parquet, Arrow or a folder that
`datasets.Dataset.save_to_disk` wrote (one document per row; extra `parquet`); or a folder of such
files. --text_field names the JSON field or the column.
Interrupted, the same command goes on; finished, it checks.

  python -m experiments.prepare_data --output=results/austen --validation=0.1
  python -m experiments.prepare_data --input=FOLDER --output=FOLDER --tokenizer=mistral
  python -m experiments.prepare_data --input=FOLDER --output=FOLDER --tokenizer=FILE/tokenizer.json
  python -m experiments.prepare_data --input=FOLDER --validation_input=FILE --output=FOLDER
  python -m experiments.prepare_data --input='FINEWEB/*.parquet' --output=FOLDER --text_field=text
  python -m experiments.prepare_data --input=DATA/train --validation_input=DATA/test --output=FOLDER
"""

from absl import flags

from deltanet_jax.data import load_tokenizer, shipped_corpus
from deltanet_jax.data.corpus.prepare import prepare
from experiments.lib import app

_INPUT = flags.DEFINE_multi_string(
  "input", None, "File, folder or glob pattern; repeatable; by default the shipped novels."
)
_OUTPUT = flags.DEFINE_string("output", None, "Folder to write.", required=True)
_TOKENIZER = flags.DEFINE_string(
  "tokenizer",
  "bytes",
  "How text becomes tokens: bytes, mistral, or the path of a tokenizer.json or SentencePiece"
  " .model, of which the output keeps a copy.",
)
_VALIDATION = flags.DEFINE_float(
  "validation",
  None,
  "Share of the text (of its bytes) that is held out, 0.01 by default; whole documents, of which"
  " one may be cut between paragraphs.",
)
_VALIDATION_INPUT = flags.DEFINE_multi_string(
  "validation_input", None, "Input of the validation split, instead of a share; repeatable."
)
_EOS = flags.DEFINE_bool("eos", True, "End documents with eos, so that a model learns to stop.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the shuffle.")
_SHARD_TOKENS = flags.DEFINE_integer("shard_tokens", 1 << 28, "Tokens after which a shard ends.")
_TEXT_FIELD = flags.DEFINE_string(
  "text_field", "text", "JSON field, or column of Parquet and Arrow files, that holds the text."
)


def _one(paths: list[str] | None) -> str | list[str] | None:
  """The path alone if it is the only one: names in the manifest are then relative to it."""
  return paths[0] if paths and len(paths) == 1 else paths


def main():
  if _VALIDATION.value is not None and _VALIDATION_INPUT.value:
    raise ValueError("--validation and --validation_input both say what is held out: give one.")
  share = 0.01 if _VALIDATION.value is None else _VALIDATION.value
  manifest = prepare(
    _one(_INPUT.value) or shipped_corpus(),
    _OUTPUT.value,
    load_tokenizer(_TOKENIZER.value),
    validation=_one(_VALIDATION_INPUT.value) or share,
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
  print(f"{manifest.dropped} empty documents left out; every checksum of {_OUTPUT.value} is right")


if __name__ == "__main__":
  app.run(main, expected=(ValueError, ImportError))
