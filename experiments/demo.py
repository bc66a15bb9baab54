"""The main job on its embedded default: trains a small DeltaNet on two novels, in minutes on a CPU.

  python -m experiments.demo

Everything goes to results/demo: run/ (checkpoints, metrics; started again it goes on), loss.png,
summary.json. Held-out bits per byte are set beside n-gram models counted on the same text. How a
Transformer++ of the same size does: `--model=transformer`, and experiments/results/demo.
"""

from experiments.lib import early_signals  # noqa: F401, before what takes seconds to import

# isort: split
import json
import pathlib
import time

from absl import flags

from deltanet_jax.data import load_tokenizer
from deltanet_jax.eval import ngram
from deltanet_jax.files import write_json, writing
from deltanet_jax.generate import Sampling, generate
from deltanet_jax.models import count_parameters
from deltanet_jax.train import load_trained, saved_steps
from experiments.configs import demo
from experiments.lib import app, provenance, records, training
from experiments.plots import demo as plot

_OUT = flags.DEFINE_string("out", "results/demo", "Folder for the run, the plot and the summary.")
_MODEL = flags.DEFINE_enum("model", "deltanet", list(demo.MIXERS), "Model to train.")
_PROMPT = flags.DEFINE_string("prompt", "It is a truth ", "What the sample continues.")
_RECORD = flags.DEFINE_bool("record", False, "Also write rows to experiments/results/demo.")


def sample(workdir: pathlib.Path) -> str:
  trained = load_trained(workdir)
  tokenizer = load_tokenizer(trained.tokenizer, workdir)
  prompt = [tokenizer.bos, *tokenizer.encode(_PROMPT.value).tolist()]
  how = Sampling(temperature=0.7, top_p=0.9)
  (row,) = generate(trained.model, [prompt], 300, sampling=how, stop=[tokenizer.eos])
  return _PROMPT.value + tokenizer.decode(row)


def counted(corpus) -> dict[str, dict]:
  """The n-gram models of the same text."""
  vocab, text = corpus.manifest.recipe.vocab, (corpus.train, corpus.validation)
  bits = lambda order: ngram.bits_per_byte(*text, order=order, vocab=vocab)
  return {name: dict(bits_per_byte=bits(n)) for name, n in (("bigram", 2), ("trigram", 3))}


def curve(workdir: pathlib.Path) -> list[tuple[int, float]]:
  """Step and held-out bits per byte, of each evaluation."""
  rows = [json.loads(row) for row in (workdir / "metrics.jsonl").read_text().splitlines()]
  name = "validation_bits_per_byte"
  return [(row["step"], row[name]) for row in rows if name in row]


def main():
  with writing(_OUT.value):
    run(pathlib.Path(_OUT.value))


def run(out: pathlib.Path):
  workdir, cfg = out / "run", demo.get_config(_MODEL.value)
  recording = records.open("demo") if _RECORD.value else None
  start = time.perf_counter()
  parameters = count_parameters(cfg.model)
  print(
    f"{_MODEL.value}: {parameters:,} parameters,"
    f" {cfg.tokens:,} bytes of two novels in {cfg.steps} updates"
  )
  begun = max(saved_steps(workdir), default=0)
  task = training.open_task(cfg, workdir)
  results = training.run(cfg, workdir, task)
  # Of a run that went on in several starts nobody knows.
  seconds = round(time.perf_counter() - start, 1) if begun == 0 else None
  metrics = dict(bits_per_byte=results["validation_bits_per_byte"], parameters=parameters)
  metrics |= dict(tokens=cfg.tokens, seed=cfg.seed, seconds=seconds, curve=curve(workdir))
  models = counted(task.corpus) | {_MODEL.value: metrics}
  rows = [dict(key=dict(model=name), metrics=x) for name, x in models.items()]
  print("\nbits per byte of chapters that were held out (less is better)")
  for name, x in models.items():
    print(f"  {plot.NAMES[name]:20}{x['bits_per_byte']:6.3f}")
  plot.figure(rows).savefig(out / "loss.png", dpi=150)
  # What trained the model has told of it; to look again is no news.
  if begun < cfg.steps or not (out / "summary.json").exists():
    write_json(out / "summary.json", dict(models=models, origin=provenance.describe()))
  if recording:
    for row in rows:
      recording.write(**row)
  print(f"\na sample:\n{sample(workdir)}\n")
  print(f"""wrote {out}/loss.png, {out}/summary.json and checkpoints in {workdir}. From here:
  go on or look again   python -m experiments.demo
  generate              python -m experiments.generate --workdir={workdir} --text="It is a truth "
  the weights alone     python -m experiments.export --workdir={workdir} --output={out}/weights
  the other model       python -m experiments.demo --model=transformer --out={out}-transformer
  your own text         python -m experiments.prepare_data --input=FOLDER --output=CORPUS
  go bigger             python -m experiments.train --workdir=DIR --config.data.corpus=CORPUS \\
                          --config=experiments/configs/lm.py:deltanet-340m""")


if __name__ == "__main__":
  app.run(main, expected=(ValueError, OSError))
