"""Print examples of a synthetic task: tokens, and targets below them.

  python -m experiments.show_data --task=mqar
  python -m experiments.show_data --task=mqar --vocab=64 --length=32 --pairs=8 --rows=1
  python -m experiments.show_data --task=mad-fuzzy_recall --split=test
  python -m experiments.show_data --task=mad-noisy_recall --setting=12
  python -m experiments.show_data --task=regbench --length=80

Below each line of tokens are the targets that have a loss, each below the token that predicts it;
masked targets are dots. A terminal shows them in color. Setting 0 of a MAD task is its baseline,
the others change one factor each.
"""

from experiments.lib import early_signals  # noqa: F401, before imports that take seconds

# isort: split
import sys

from absl import flags

from deltanet_jax.data import MQAR, Batch, RegBench, StateTracking, Task, mad
from deltanet_jax.data.synthetic import GROUPS
from experiments.lib import app

_MAD = "mad-"
_TASKS = ["mqar", *(_MAD + name for name in mad.TASKS), "regbench", *GROUPS]

_TASK = flags.DEFINE_enum("task", "mqar", _TASKS, "Task to show.")
_SPLIT = flags.DEFINE_enum(
  "split", "training", ["training", "validation", "test"], "Split of the task."
)
_ROWS = flags.DEFINE_integer("rows", 3, "Number of examples.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the examples.", lower_bound=0)
_SETTING = flags.DEFINE_integer("setting", 0, "Index of the setting of a MAD task.", lower_bound=0)
_LENGTH = flags.DEFINE_integer("length", None, "Sequence length; short by default.", lower_bound=1)
_VOCAB = flags.DEFINE_integer("vocab", None, "Vocabulary size, of mqar and MAD.", lower_bound=2)
_PAIRS = flags.DEFINE_integer("pairs", None, "Key-value pairs of mqar.", lower_bound=1)
_COLOR = flags.DEFINE_enum(
  "color", "auto", ["auto", "always", "never"], "Use colors; auto: only on a terminal."
)
flags.DEFINE_alias("colour", "color")  # its name before version 0.2
_WIDTH = flags.DEFINE_integer("width", 96, "Characters per line.", lower_bound=20)


def _given(**flags_of_task) -> dict:
  """Defaults updated by flags that were set; ValueError for a flag that the task lacks."""
  known = dict(vocab=_VOCAB, pairs=_PAIRS, length=_LENGTH)
  values = {name: flag.value for name, flag in known.items() if flag.value is not None}
  if foreign := [name for name in values if name not in flags_of_task]:
    raise ValueError(f"{_TASK.value} has no --{foreign[0]}: remove it.")
  return flags_of_task | values


def open_task() -> Task:
  name, rows = _TASK.value, _ROWS.value
  if _SETTING.value and not name.startswith(_MAD):
    raise ValueError(f"--setting is for MAD tasks, {name} has none: remove it.")
  sets = dict(batch=rows, seed=_SEED.value)
  splits = dict(validation_examples=rows, test_examples=rows)
  if name == "mqar":
    return MQAR(**_given(vocab=64, length=32, pairs=4), **sets, **splits)
  if name == "regbench":
    return RegBench(**_given(length=160), examples=None, **sets, **splits)
  if name in GROUPS:
    return StateTracking(name, **_given(length=24), **sets, validation_batches=1)
  task = name.removeprefix(_MAD)
  settings = mad.SETTINGS[task]
  if _SETTING.value >= len(settings):
    raise ValueError(f"--setting is {_SETTING.value}, but {name} has 0 to {len(settings) - 1}.")
  chosen = settings[_SETTING.value] | dict(examples=None)
  chosen |= _given(vocab=chosen["vocab"], length=chosen["length"])
  return mad.make(task, **chosen, **sets, **splits)


def first_batch(task: Task) -> Batch:
  match _SPLIT.value:
    case "training":
      return task.batch(0, 0, 1)
    case "validation":
      return next(iter(task.validation(0, 1)))
    case _ if isinstance(task, StateTracking):
      raise ValueError(f"{_TASK.value} has no test split: use --split=validation.")
    case _:
      return next(iter(task.test.validation(0, 1)))


def spell(task: Task, token: int) -> str:
  """A letter for RegBench, else the token id."""
  if not isinstance(task, RegBench):
    return str(token)
  return {0: ".", task.separator: "|"}.get(token, chr(ord("a") + token - 1))


def paragraphs(task: Task, batch: Batch, color: bool) -> str:
  tokens = [[spell(task, x) for x in row] for row in batch["tokens"].tolist()]
  targets = [[spell(task, x) for x in row] for row in batch["targets"].tolist()]
  cell = max(len(x) for rows in (tokens, targets) for row in rows for x in row) + 1
  per_line = max(_WIDTH.value // cell, 1)
  paint = lambda text, code: f"\033[{code}m{text}\033[0m" if color and text.strip() else text
  lines = []
  for number, (row, wanted, mask) in enumerate(zip(tokens, targets, batch["mask"])):
    lines.append(f"example {number}: {mask.sum()} of {len(row)} targets have a loss")
    for at in range(0, len(row), per_line):
      part = slice(at, at + per_line)
      upper = [paint(x.rjust(cell), 36 if m else 0) for x, m in zip(row[part], mask[part])]
      lower = [
        paint((x if m else "·").rjust(cell), 33 if m else 2)
        for x, m in zip(wanted[part], mask[part])
      ]
      lines += ["".join(upper), "".join(lower)]
    lines.append("")
  return "\n".join(lines)


def main():
  task = open_task()
  batch = first_batch(task)
  color = _COLOR.value == "always" or (_COLOR.value == "auto" and sys.stdout.isatty())
  print(f"{task.identity()['task']}; vocabulary {task.vocab}, {_SPLIT.value}\n")
  print(paragraphs(task, batch, color), end="")


if __name__ == "__main__":
  app.run(main)
