"""Train a small DeltaNet on two bundled novels: minutes on a CPU, no download.

  python -m experiments.demo

Writes to results/demo: run/ (checkpoints and metrics; the same command resumes), loss.png and
summary.json. Validation bits per byte are compared with n-gram models counted on the same text.
For a Transformer++ of the same size: `--model=transformer`, or experiments/results/demo.
"""

from experiments.lib import early_signals  # noqa: F401, before imports that take seconds

# isort: split
import json
import pathlib

from absl import flags

from deltanet_jax.data import Corpus, load_tokenizer
from deltanet_jax.eval import Validation, ngram
from deltanet_jax.files import as_local_path, write_json, writing
from deltanet_jax.generate import Sampling, generate
from deltanet_jax.models import count_parameters
from deltanet_jax.train import load_trained, saved_steps
from experiments.configs import demo
from experiments.lib import app, provenance, records, training
from experiments.lib.training_run import TrainingRun
from experiments.plots import demo as plot

_OUT = flags.DEFINE_string("out", "results/demo", "Folder for the run, the plot and the summary.")
_MODEL = flags.DEFINE_enum("model", "deltanet", list(demo.MIXERS), "Model to train.")
_PROMPT = flags.DEFINE_string("prompt", "It is a truth ", "Prompt of the generated sample.")
_RECORD = flags.DEFINE_bool("record", False, "Also write records to experiments/results/demo.")


def sample(workdir: pathlib.Path) -> str:
  """Generate a continuation of the prompt."""
  trained = load_trained(workdir)
  tokenizer = load_tokenizer(trained.tokenizer, workdir)
  prompt = [tokenizer.bos, *tokenizer.encode(_PROMPT.value).tolist()]
  sampling = Sampling(temperature=0.7, top_p=0.9)
  (tokens,) = generate(trained.model, [prompt], 300, sampling=sampling, stop=[tokenizer.eos])
  return _PROMPT.value + tokenizer.decode(tokens)


def ngrams(corpus: Corpus) -> dict[str, dict]:
  """Validation bits per byte of n-gram models counted on the training split."""
  vocab, splits = corpus.manifest.recipe.vocab, (corpus.train, corpus.validation)
  bits = lambda order: ngram.bits_per_byte(*splits, order=order, vocab=vocab)
  return {name: dict(bits_per_byte=bits(n)) for name, n in (("bigram", 2), ("trigram", 3))}


def curve(workdir: pathlib.Path) -> list[tuple[int, float]]:
  """Step and validation bits per byte of each evaluation."""
  logged = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  name = "validation_bits_per_byte"
  return [(x["step"], x[name]) for x in logged if name in x]


def main():
  with writing(_OUT.value):
    run(as_local_path(_OUT.value, "--out"))


def run(out: pathlib.Path):
  workdir, cfg = out / "run", demo.get_config(_MODEL.value)
  recording = records.open("demo") if _RECORD.value else None
  parameters = count_parameters(cfg.model)
  print(
    f"{_MODEL.value}: {parameters:,} parameters,"
    f" {cfg.tokens:,} bytes of two novels in {cfg.steps} updates"
  )
  was_complete = cfg.steps in saved_steps(workdir)
  task = training.open_task(cfg, workdir)
  trained = training.train_and_record(
    TrainingRun(cfg, task, [Validation(task, cfg.eval_batches)]),
    workdir,
    dict(model=_MODEL.value),
    lambda last: dict(
      bits_per_byte=last["validation_bits_per_byte"],
      parameters=parameters,
      tokens=cfg.tokens,
      seed=cfg.seed,
      curve=curve(workdir),
    ),
    records=recording,
    keep_workdir=True,
  )
  counted = ngrams(task.corpus)
  if recording:
    for name, metrics in counted.items():
      recording.write(dict(model=name), metrics)
  models = counted | {_MODEL.value: trained}
  print("\nvalidation bits per byte, on chapters not trained on (lower is better)")
  for name, metrics in models.items():
    print(f"  {plot.NAMES[name]:20}{metrics['bits_per_byte']:6.3f}")
  rows = [dict(key=dict(model=name), metrics=metrics) for name, metrics in models.items()]
  plot.figure(rows).savefig(out / "loss.png", dpi=150)
  # A command that only looks at a complete run must not overwrite the summary of its training.
  if not was_complete or not (out / "summary.json").exists():
    write_json(out / "summary.json", dict(models=models, origin=provenance.describe()))
  print(f"\na sample:\n{sample(workdir)}\n")
  print(f"""wrote {out}/loss.png, {out}/summary.json and checkpoints in {workdir}. From here:
  resume or show again  python -m experiments.demo
  generate              python -m experiments.generate --workdir={workdir} --text="It is a truth "
  export the weights    python -m experiments.export --workdir={workdir} --output={out}/weights
  the other model       python -m experiments.demo --model=transformer --out={out}-transformer
  your own text         python -m experiments.prepare_data --input=FOLDER --output=CORPUS
  a larger model        python -m experiments.train --workdir=DIR --config.data.corpus=CORPUS \\
                          --config=lm:deltanet-340m""")


if __name__ == "__main__":
  app.run(main, own_signals=True, expected=(ValueError, OSError))
