"""The main job on its embedded default: trains a small DeltaNet on two novels, in minutes on a CPU.

  python -m experiments.demo

Everything goes to results/demo: run/ (checkpoints, metrics; started again it goes on), loss.png,
summary.json. Held-out bits per byte are set beside n-gram models counted on the same text and a
Transformer++ of the same size, trained once with the same settings (results/demo.jsonl here).
"""

import json
import pathlib
import time

from absl import app, flags, logging

from deltanet_jax.data import load_tokenizer
from deltanet_jax.eval import ngram
from deltanet_jax.generate import Sampling, generate
from deltanet_jax.models import count_parameters
from deltanet_jax.train.export import load_trained
from deltanet_jax.train.loop import PreemptionError, train
from experiments import provenance
from experiments.configs import demo
from experiments.plots.training import draw
from experiments.train import PREEMPTED, open_data

_OUT = flags.DEFINE_string("out", "results/demo", "Folder for the run, the plot and the summary.")
_MIXER = flags.DEFINE_enum("mixer", "deltanet", list(demo.MIXERS), "Model to train.")
_PROMPT = flags.DEFINE_string("prompt", "It is a truth ", "What the sample continues.")

_RECORDED = pathlib.Path(__file__).parent / "results" / "demo.jsonl"


def recorded(mixer: str) -> dict | None:
  """The row of an earlier run of this model, kept in the repository."""
  rows = [json.loads(row) for row in _RECORDED.read_text().splitlines()]
  return next((row for row in rows if row["model"] == mixer), None)


def sample(workdir, tokenizer) -> str:
  trained = load_trained(workdir)
  prompt = [tokenizer.bos, *tokenizer.encode(_PROMPT.value).tolist()]
  how = Sampling(temperature=0.7, top_p=0.9)
  (row,) = generate(trained.model, [prompt], 300, sampling=how, stop=[tokenizer.bos])
  return _PROMPT.value + tokenizer.decode(row)


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f"unexpected argument {argv[1]!r}; see --help")
  logging.set_verbosity(logging.WARNING)
  out = pathlib.Path(_OUT.value)
  workdir, cfg = out / "run", demo.get_config(_MIXER.value)
  tokenizer = load_tokenizer("bytes")
  start = time.perf_counter()
  print(
    f"{_MIXER.value}: {count_parameters(cfg.model):,} parameters,"
    f" {cfg.tokens:,} bytes of two novels in {cfg.steps} updates"
  )
  try:
    result = train(cfg, workdir, lambda: open_data(cfg, workdir), origin=provenance.describe())
  except PreemptionError as e:
    print(e)
    raise SystemExit(PREEMPTED) from e
  seconds = time.perf_counter() - start
  bits, corpus = result["validation_bits_per_byte"], open_data(cfg, workdir)
  table = {
    f"{name}, counted": _ngram(corpus, order) for name, order in (("bigram", 2), ("trigram", 3))
  }
  other = recorded("transformer")
  if other is not None and _MIXER.value != "transformer":
    table["transformer++ of the same size, recorded"] = other["bits_per_byte"]
  table[f"{_MIXER.value}, just trained"] = bits
  print("\nbits per byte of chapters that were held out (less is better)")
  for name, value in table.items():
    print(f"  {name:42}{value:6.3f}")
  draw(workdir, out / "loss.png", {k: v for k, v in table.items() if "just" not in k})
  summary = dict(
    model=_MIXER.value, parameters=count_parameters(cfg.model), tokens=cfg.tokens, seed=cfg.seed
  )
  summary |= dict(bits_per_byte=bits, seconds=round(seconds, 1), beside=table)
  (out / "summary.json").write_text(json.dumps(summary | provenance.describe(), indent=1) + "\n")
  print(f"\na sample:\n{sample(workdir, tokenizer)}\n")
  print(f"""wrote {out}/loss.png, {out}/summary.json and checkpoints in {workdir}. From here:
  go on or look again   python -m experiments.demo
  generate              python -m experiments.generate --workdir={workdir} --text="It is a truth "
  the weights alone     python -m experiments.export --workdir={workdir} --output={out}/weights
  the other model       python -m experiments.demo --mixer=transformer --out={out}-transformer
  your own text         python -m experiments.prepare_data --input=FOLDER --output=CORPUS
  go bigger             python -m experiments.train --workdir=DIR --config.data.corpus=CORPUS \\
                          --config=experiments/configs/lm.py:deltanet-340m""")


def _ngram(corpus, order: int) -> float:
  vocab = corpus.manifest.recipe.vocab
  return ngram.bits_per_byte(corpus.train, corpus.validation, order=order, vocab=vocab)


if __name__ == "__main__":
  app.run(main)
