"""The language-model tables of the paper: their columns, and their rows by name."""

from experiments.lib import config_modules

# Task and metric of each column, as lm-evaluation-harness names them.
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
# The column ARC of table 2 is the mean of arc_easy and arc_challenge.
TABLE2 = (
  ("arc", "acc_norm"),
  ("hellaswag", "acc_norm"),
  ("openbookqa", "acc_norm"),
  ("piqa", "acc"),
  ("winogrande", "acc"),
  ("mmlu", "acc"),
)
FILES = ("lm_340m", "lm_1_3b", "lm_ablations", "lm_3b")
PaperRow = dict[tuple[str, str], float]  # value by task and metric


def paper_row(columns: tuple[tuple[str, str], ...], *values: float) -> PaperRow:
  """One row of a table: perplexities and percentages by column."""
  return dict(zip(columns, values, strict=True))


def paper_rows() -> dict[str, PaperRow]:
  """Every row by its name in a config file and the size: "deltanet-340m", "l1-elu-340m"."""
  rows = {}
  for name in FILES:
    module = config_modules.load(config_modules.find(name))
    rows |= {f"{row}-{module.SIZE}": values for row, values in module.PAPER.items()}
  return rows


def paper_value(task: str, metric: str, row: PaperRow) -> float | None:
  """The value of a task and metric in a row of the paper; None if the paper has none."""
  joint = "arc" if task in ("arc_easy", "arc_challenge") and metric == "acc_norm" else task
  return row.get((task, metric), row.get((joint, metric)))
