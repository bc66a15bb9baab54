"""The one road of results: rows of experiments/results/<name>/records.jsonl.

A row is `{"key": {...}, "metrics": {...}, "provenance": {...}}`; one with the same key replaces the
older one. Rows are written as they finish, so that a measurement that is stopped keeps what it has.
"""

import functools
import json
import pathlib

from absl import flags

from deltanet_jax import files
from experiments.lib import provenance

_RESULTS = flags.DEFINE_string(
  "results", None, "Folder of all results; the checkout's experiments/results if unset."
)
_ALLOW_MODIFIED = flags.DEFINE_bool(
  "allow_modified", False, "Measure uncommitted code; the rows say so, and tests refuse them."
)
_AGAIN = flags.DEFINE_bool(
  "again", False, "Measure also what has a row from this commit; otherwise it is left out."
)
_FLAGS = ("results", "allow_modified", "again")


class Records:
  """Rows of one file, with the provenance that new ones get."""

  def __init__(self, path: pathlib.Path, origin: dict, again: bool = False):
    self.path, self._origin, self._again = path, origin, again
    self._written = []

  def has(self, key: dict) -> bool:
    """Whether this commit has a row of this key, so that a stopped command can go on."""
    mine = lambda row: row["key"] == key and row["provenance"]["commit"] == self._origin["commit"]
    modified = "modified" in self._origin  # the same commit, but who knows which code
    return not self._again and not modified and any(map(mine, _read(self.path)))

  def find(self, key: dict, facts: dict) -> dict | None:
    """The row of this key whose provenance has these facts, whatever its commit.

    None if everything is to be measured again, and this one has not been yet.
    """
    if self._again and key not in self._written:
      return None
    same = lambda row: row["key"] == key and facts.items() <= row["provenance"].items()
    return next(filter(same, _read(self.path)), None)

  def write(
    self, key: dict, metrics: dict, seconds: float | None = None, facts: dict | None = None
  ):
    """Adds a row, or replaces the one of this key.

    Args:
      seconds: what measuring it took.
      facts: more of where it comes from, text by name, to be found by.
    """
    took = {} if seconds is None else dict(seconds=round(seconds, 1))
    new = dict(key=key, metrics=metrics, provenance=self._origin | took | (facts or {}))
    self.path.parent.mkdir(parents=True, exist_ok=True)
    # Read again each time, and nobody writes meanwhile: another command may have added rows since.
    with files.locked(self.path.parent, wait=True):
      rows = [row for row in _read(self.path) if row["key"] != key] + [new]
      rows.sort(key=lambda row: _order(row["key"]))
      lines = [json.dumps(row, allow_nan=False) + "\n" for row in rows]
      files.write_text(self.path, "".join(lines))
    self._written.append(key)


def open(name: str, *, reading: bool = False) -> Records:
  """The records of `name`, to write to; ValueError if the code is not a commit's.

  To be called before anything is measured.

  Args:
    reading: nothing will be written, so it may be any code.
  """
  if reading:
    return Records(_file(name), {})
  refuse_modified(provenance.CHECKOUT, allow=_ALLOW_MODIFIED.value)
  return Records(_file(name), _origin(), _AGAIN.value)


def beside(folder: pathlib.Path) -> Records:
  """Records in a folder of the user's own; of uncommitted code too, and the rows say so."""
  return Records(folder / "records.jsonl", _origin())


def _origin() -> dict:
  own = tuple(f"--{x}" for x in _FLAGS)
  words = [x for x in provenance.command().split() if not x.startswith(own)]
  return provenance.describe() | dict(command=" ".join(words))


def refuse_modified(checkout: pathlib.Path, allow: bool):
  """ValueError unless results can be traced to a commit, or that is not asked for."""
  if allow:
    return
  if provenance.commit(checkout) is None:
    raise ValueError(
      f"{checkout} is no git checkout, so that no row could say which code was measured; clone the"
      " repository, or pass --allow_modified."
    )
  if changed := provenance.modified_code(checkout):
    raise ValueError(
      f"uncommitted code ({', '.join(changed[:3])}{', ...' if changed[3:] else ''}): commit it, or"
      " pass --allow_modified, and the rows will say so."
    )


def read(name: str) -> list[dict]:
  """All rows, sorted by their keys; none if there is no file."""
  return _read(_file(name))


def results() -> pathlib.Path:
  """The folder of all results."""
  given = _RESULTS.value if flags.FLAGS.is_parsed() else None
  return pathlib.Path(given) if given else provenance.CHECKOUT / "experiments/results"


def _file(name):
  return results() / name / "records.jsonl"


def _read(path):
  if not path.exists():
    return []
  known = path.stat()
  return list(_parsed(path, known.st_mtime_ns, known.st_size))


@functools.lru_cache(maxsize=4)
def _parsed(path, *_) -> list[dict]:
  """The rows of a file that was last changed then; a sweep asks for them at every run."""
  return [json.loads(line) for line in path.read_text().splitlines()]


def _order(key):
  """Field by field; numbers by size, and what has none first."""

  def rank(value):
    if value is None:
      return 0, 0
    if isinstance(value, bool | int | float):
      return 1, value
    return 2, value if isinstance(value, str) else json.dumps(value)

  return [(name, *rank(value)) for name, value in key.items()]
