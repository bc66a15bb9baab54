"""Records of results: experiments/results/<name>/records.jsonl, one JSON object per line.

A record is `{"key": {...}, "metrics": {...}, "provenance": {...}}`; a new one replaces the record
with the same key. Commands write each record as soon as it is measured, so an interrupted command
loses at most the measurement in progress.
"""

import functools
import json
import pathlib

from absl import flags

from deltanet_jax import files
from experiments.lib import provenance

_RESULTS = flags.DEFINE_string(
  "results",
  None,
  "Folder of all results; by default experiments/results of the checkout, or ./results if the"
  " package is installed from a wheel.",
)
_ALLOW_MODIFIED = flags.DEFINE_bool(
  "allow_modified", False, "Measure uncommitted code; records are marked, and tests reject them."
)
_AGAIN = flags.DEFINE_bool(
  "again", False, "Also measure what has a record of this commit, instead of skipping it."
)
_FLAGS = ("results", "allow_modified", "again")


class Records:
  """The records of one file, and the provenance of those written to it."""

  def __init__(self, path: pathlib.Path, provenance: dict, again: bool = False):
    """Args:
    provenance: stored in every record that is written.
    again: treat existing records as missing until they are written anew.
    """
    self.path, self._provenance, self._again = path, provenance, again
    self._written = []

  def has(self, key: dict) -> bool:
    """Whether this commit has a record of the key; a resumed command skips it."""
    # Uncommitted code may differ between two starts although the commit is the same.
    if self._again or "modified" in self._provenance:
      return False
    commit = self._provenance["commit"]
    return any(x["key"] == key and x["provenance"]["commit"] == commit for x in _read(self.path))

  def find(self, key: dict, provenance: dict) -> dict | None:
    """The record of the key, of any commit, if its provenance contains these entries.

    With --again, None until the record was written by this command.
    """
    if self._again and key not in self._written:
      return None
    matches = lambda x: x["key"] == key and provenance.items() <= x["provenance"].items()
    return next(filter(matches, _read(self.path)), None)

  def write(
    self,
    key: dict,
    metrics: dict,
    seconds: float | None = None,
    more_provenance: dict | None = None,
  ):
    """Add a record, or replace the one with this key.

    Args:
      seconds: time of the measurement.
      more_provenance: entries in addition to those of all records, such as hashes.
    """
    origin = self._provenance | ({} if seconds is None else dict(seconds=round(seconds, 1)))
    new = dict(key=key, metrics=metrics, provenance=origin | (more_provenance or {}))
    self.path.parent.mkdir(parents=True, exist_ok=True)
    # Read the file again, under a lock: another process may have added records.
    with files.locked(self.path.parent, wait=True):
      records = [x for x in _read(self.path) if x["key"] != key] + [new]
      records.sort(key=lambda x: sort_key(x["key"]))
      lines = [json.dumps(x, allow_nan=False) + "\n" for x in records]
      files.write_text(self.path, "".join(lines))
    self._written.append(key)


def open(name: str, *, read_only: bool = False) -> Records:
  """Open experiments/results/<name>/records.jsonl; call it before measuring anything.

  Args:
    read_only: nothing will be written, so uncommitted code is fine.

  Raises:
    ValueError: the code is not committed, and --allow_modified is not set.
  """
  if read_only:
    return Records(_file(name), {})
  if not provenance.INSTALLED:  # a release names its code by its version
    check_committed(provenance.CHECKOUT, allow_modified=_ALLOW_MODIFIED.value)
  return Records(_file(name), _provenance(), _AGAIN.value)


def open_folder(folder: pathlib.Path, *, read_only: bool = False) -> Records:
  """Open records.jsonl in a folder of the user; uncommitted code is allowed, but recorded.

  Args:
    read_only: nothing will be written.
  """
  return Records(folder / "records.jsonl", {} if read_only else _provenance(), _AGAIN.value)


def _provenance() -> dict:
  own = tuple(f"--{x}" for x in _FLAGS)
  words = [x for x in provenance.command().split() if not x.startswith(own)]
  return provenance.describe() | dict(command=" ".join(words))


def check_committed(checkout: pathlib.Path, *, allow_modified: bool):
  """ValueError if results could not be traced to a commit, unless that is allowed."""
  if allow_modified:
    return
  if provenance.commit(checkout) is None:
    raise ValueError(
      f"{checkout} is not a git checkout, so records cannot name the commit that was measured:"
      " clone the repository, or pass --allow_modified."
    )
  if changed := provenance.modified_code(checkout):
    raise ValueError(
      f"uncommitted code ({', '.join(changed[:3])}{', ...' if changed[3:] else ''}): commit it, or"
      " pass --allow_modified, which marks the records."
    )


def read(name: str) -> list[dict]:
  """All records of experiments/results/<name>, sorted by key; empty if there is no file."""
  return _read(_file(name))


def results() -> pathlib.Path:
  """The folder of all results: of the checkout, or in the working directory if installed."""
  given = _RESULTS.value if flags.FLAGS.is_parsed() else None
  default = "results" if provenance.INSTALLED else provenance.CHECKOUT / "experiments/results"
  return files.as_local_path(given or default, "--results")


def _file(name: str) -> pathlib.Path:
  return results() / name / "records.jsonl"


def _read(path: pathlib.Path) -> list[dict]:
  if not path.exists():
    return []
  stat = path.stat()
  return list(_parse(path, stat.st_mtime_ns, stat.st_size))


@functools.lru_cache(maxsize=4)
def _parse(path: pathlib.Path, *_) -> list[dict]:
  """Parse a file; cached by its time and size, because a sweep reads it for every run."""
  return [json.loads(line) for line in path.read_text().splitlines()]


def sort_key(key: dict) -> list[tuple]:
  """Orders records field by field: None first, numbers by value, then text."""

  def rank(value):
    if value is None:
      return 0, 0
    if isinstance(value, bool | int | float):
      return 1, value
    return 2, value if isinstance(value, str) else json.dumps(value)

  return [(name, *rank(value)) for name, value in key.items()]
