"""Download public-domain text and tokenize it as bytes, for the small language-model sweep.

  make corpus
  python -m experiments.fetch_corpus             # the same
  python -m experiments.fetch_corpus --shipped   # without network: the two bundled novels

About 26 MB from the Debian packages listed in experiments/lib/debian_texts.py, downloaded but not
installed: mostly religious prose, and six novels. OUTPUT/text.jsonl has the documents,
OUTPUT/tokens the corpus, which is tokenized again only if the text has changed.
"""

from experiments.lib import early_signals  # noqa: F401, before imports that take seconds

# isort: split
import collections
import json
import shutil

from absl import flags

from deltanet_jax import files
from deltanet_jax.data import load_tokenizer, shipped_corpus
from deltanet_jax.data.corpus.prepare import prepare
from deltanet_jax.files import writing
from experiments.lib import app, debian_texts

_OUTPUT = flags.DEFINE_string("output", "results/corpus", "Folder for text and tokens.")
_SHIPPED = flags.DEFINE_bool("shipped", False, "Use the bundled novels instead.")
VALIDATION = 0.01  # fraction of the bytes; 0.1 of the bundled novels, which are short


def main():
  output = files.as_local_path(_OUTPUT.value, "--output")
  with writing(output):
    output.mkdir(parents=True, exist_ok=True)
    text, fraction = shipped_corpus(), 0.1
    if not _SHIPPED.value:
      text, fraction = output / "text.jsonl", VALIDATION
      sizes = collections.Counter()
      with files.replacing(text) as new, open(new, "w") as file:
        for package, piece in debian_texts.fetch():
          file.write(json.dumps(dict(text=piece, source=package), ensure_ascii=False) + "\n")
          sizes[package] += len(piece.encode())
      for package, size in sizes.items():
        print(f"{size / 1e6:5.1f} MB  {package}: {debian_texts.PACKAGES[package]}")
    tokens, hash_file = output / "tokens", output / "text.sha256"
    found = files.sha256(text)
    if tokens.exists() and (not hash_file.is_file() or hash_file.read_text() != found):
      shutil.rmtree(tokens)  # tokens of another text
    manifest = prepare(text, tokens, load_tokenizer("bytes"), validation=fraction)
    files.write_text(hash_file, found)
  train, validation = manifest.train, manifest.validation
  print(
    f"{tokens}: {train.bytes / 1e6:.1f} MB in {train.documents} documents for training,"
    f" {validation.bytes / 1e3:.0f} kB in {validation.documents} for validation; sha256 of the text"
    f" {found[:12]}"
  )


if __name__ == "__main__":
  app.run(main, expected=(ValueError, OSError))
