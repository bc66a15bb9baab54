"""Turns text into a corpus to train on: shuffled documents as tokens in memory-mapped shards.

Input is a text file (.txt, .md or text without a suffix: one document), JSON lines or JSON (.jsonl,
.json: one document an object) or a folder of such files, plain or ending in .gz, .xz or .zst.
Interrupted, the same command goes on; finished, it checks.

  python -m experiments.prepare_data --output=results/austen --validation=0.1
  python -m experiments.prepare_data --input=FOLDER --output=FOLDER --tokenizer=mistral
  python -m experiments.prepare_data --input=FOLDER --output=FOLDER --tokenizer=FILE/tokenizer.json
  python -m experiments.prepare_data --input=FOLDER --validation_input=FILE --output=FOLDER
"""

from absl import flags

from deltanet_jax.data import load_tokenizer, shipped_corpus
from deltanet_jax.data.corpus.prepare import prepare
from experiments.lib import app

_INPUT = flags.DEFINE_string("input", None, "File or folder; by default the shipped novels.")
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
_VALIDATION_INPUT = flags.DEFINE_string(
  "validation_input", None, "File or folder that is held out instead of a share."
)
_EOS = flags.DEFINE_bool("eos", True, "End documents with eos, so that a model learns to stop.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the shuffle.")
_SHARD_TOKENS = flags.DEFINE_integer("shard_tokens", 1 << 28, "Tokens after which a shard ends.")
_TEXT_FIELD = flags.DEFINE_string("text_field", "text", "Where JSON has the text.")


def main():
  if _VALIDATION.value is not None and _VALIDATION_INPUT.value:
    raise ValueError("--validation and --validation_input both say what is held out: give one.")
  share = 0.01 if _VALIDATION.value is None else _VALIDATION.value
  manifest = prepare(
    _INPUT.value or shipped_corpus(),
    _OUTPUT.value,
    load_tokenizer(_TOKENIZER.value),
    validation=_VALIDATION_INPUT.value or share,
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
