"""Fetches public-domain text and prepares it as bytes, for the small table of language models.

  make corpus
  python -m experiments.fetch_corpus             # the same
  python -m experiments.fetch_corpus --shipped   # without a network: the two novels of this package

About 26 MB from packages of Debian that are named in experiments/lib/debian_texts.py, downloaded by
name and not installed: mostly religious prose, and six novels. OUTPUT/text.jsonl has the documents,
OUTPUT/tokens is the corpus. It is prepared again only if the text has changed.
"""

import collections
import json
import pathlib
import shutil

from absl import flags

from deltanet_jax import files
from deltanet_jax.data import load_tokenizer, shipped_corpus
from deltanet_jax.data.corpus.prepare import prepare
from deltanet_jax.files import writing
from experiments.lib import app, debian_texts

_OUTPUT = flags.DEFINE_string("output", "results/corpus", "Folder of text and tokens.")
_SHIPPED = flags.DEFINE_bool("shipped", False, "The novels of this package instead.")
VALIDATION = 0.01  # of the text's bytes; of the shipped text, which is small, a tenth


def main():
  output = pathlib.Path(_OUTPUT.value)
  with writing(output):
    output.mkdir(parents=True, exist_ok=True)
    text, share = shipped_corpus(), 0.1
    if not _SHIPPED.value:
      text, share = output / "text.jsonl", VALIDATION
      sizes = collections.Counter()
      with files.replacing(text) as new, open(new, "w") as file:
        for package, piece in debian_texts.fetch():
          file.write(json.dumps(dict(text=piece, source=package), ensure_ascii=False) + "\n")
          sizes[package] += len(piece.encode())
      for package, size in sizes.items():
        print(f"{size / 1e6:5.1f} MB  {package}: {debian_texts.PACKAGES[package]}")
    tokens, kept = output / "tokens", output / "text.sha256"
    found = files.sha256(text)
    if tokens.exists() and (not kept.is_file() or kept.read_text() != found):
      shutil.rmtree(tokens)  # of another text
    manifest = prepare(text, tokens, load_tokenizer("bytes"), validation=share)
    files.write_text(kept, found)
  train, held = manifest.train, manifest.validation
  print(
    f"{tokens}: {train.bytes / 1e6:.1f} MB in {train.documents} documents to train on,"
    f" {held.bytes / 1e3:.0f} kB in {held.documents} held out; sha256 of the text {found[:12]}"
  )


if __name__ == "__main__":
  app.run(main, expected=(ValueError, OSError))
