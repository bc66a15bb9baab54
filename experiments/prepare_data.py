"""Turns text into a corpus to train on: shuffled documents as tokens in memory-mapped shards.

Input is a text file (one document), JSON lines (one document a line) or a folder of such files,
plain or ending in .gz, .xz or .zst. Interrupted, the same command goes on; finished, it checks.

  python -m experiments.prepare_data --output=results/austen --validation=0.1
  python -m experiments.prepare_data --input=FOLDER --output=FOLDER --tokenizer=mistral
"""

from absl import flags

from deltanet_jax.data import TOKENIZERS, load_tokenizer, shipped_corpus
from deltanet_jax.data.corpus.prepare import prepare
from experiments.lib import app

_INPUT = flags.DEFINE_string("input", None, "File or folder; by default the shipped novels.")
_OUTPUT = flags.DEFINE_string("output", None, "Folder to write.", required=True)
_TOKENIZER = flags.DEFINE_enum("tokenizer", "bytes", TOKENIZERS, "How text becomes tokens.")
_VALIDATION = flags.DEFINE_float("validation", 0.01, "Share of the documents that is held out.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the shuffle.")
_SHARD_TOKENS = flags.DEFINE_integer("shard_tokens", 1 << 28, "Tokens after which a shard ends.")
_TEXT_FIELD = flags.DEFINE_string("text_field", "text", "Where JSON lines have the text.")


def main():
  manifest = prepare(
    _INPUT.value or shipped_corpus(),
    _OUTPUT.value,
    load_tokenizer(_TOKENIZER.value),
    validation=_VALIDATION.value,
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
  app.run(main, expected=(ValueError, FileNotFoundError, ImportError))
