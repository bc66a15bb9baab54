"""The paper's tables of language models: their columns, and their lines by name."""

import importlib

# Task and metric of each column, as the harness calls them.
TABLE1 = (
  ("wikitext", "word_perplexity"),
  ("lambada_openai", "perplexity"),
  ("lambada_openai", "acc"),
  ("piqa", "acc"),
  ("hellaswag", "acc_norm"),
  ("winogrande", "acc"),
  ("arc_easy", "acc"),
  ("arc_challenge", "acc_norm"),
  ("swde", "contains"),
  ("squad_completion", "contains"),
  ("fda", "contains"),
)
# Its column ARC is the mean of two.
TABLE2 = (
  ("arc", "acc_norm"),
  ("hellaswag", "acc_norm"),
  ("openbookqa", "acc_norm"),
  ("piqa", "acc"),
  ("winogrande", "acc"),
  ("mmlu", "acc"),
)
FILES = ("lm_340m", "lm_1_3b", "lm_ablations", "lm_3b")
Line = dict[tuple[str, str], float]


def line(columns: tuple[tuple[str, str], ...], *metrics: float) -> Line:
  """Perplexities, and percent, by column."""
  return dict(zip(columns, metrics, strict=True))


def lines() -> dict[str, Line]:
  """Every line, by the row of its file and the size: "deltanet-340m", "l1-elu-340m"."""
  found = {}
  for name in FILES:
    module = importlib.import_module(f"experiments.configs.{name}")
    found |= {f"{row}-{module.SIZE}": metrics for row, metrics in module.PAPER.items()}
  return found


def beside(task: str, metric: str, paper: Line) -> float | None:
  """The paper's figure of a task in one of its lines, where it has one."""
  joint = "arc" if task in ("arc_easy", "arc_challenge") and metric == "acc_norm" else task
  return paper.get((task, metric), paper.get((joint, metric)))
