"""Any task of the harness by its name, and tasks of a folder of the user's (`include_path`)."""

import contextlib
import functools
import pathlib
from collections.abc import Iterable
from typing import Any

from deltanet_jax.config import nearest
from deltanet_jax.eval.harness import hub, package
from deltanet_jax.files import as_local_path

# Builders of `datasets` that read files.
_FILES = ("arrow", "csv", "json", "parquet", "text")


class NamedTasks:
  """Tasks, groups and tags by name: those of a folder first, then those of the harness.

  Raises:
    ValueError: the folder does not exist, has no YAML file, or one that cannot be read.
  """

  def __init__(self, include_path: str | pathlib.Path | None = None):
    self._folder = None if include_path is None else as_local_path(include_path, "include_path")
    self._managers: dict[bool, Any] = {}
    if self._folder is not None:
      _check_folder(self._folder)
    self.own = [] if self._folder is None else self._manager(True).all_tasks

  def check(self, name: str, known: Iterable[str], aliases: Iterable[str]):
    """Raise ValueError unless there is such a task, group or tag.

    Args:
      known: names of other tasks, for a hint.
      aliases: other names that are allowed.
    """
    if name in self.own or name in self._manager(False).all_tasks:
      return
    near = nearest(name, [*known, *aliases, *self.own]) or nearest(
      name, self._manager(False).all_tasks
    )
    folder = "" if self._folder is None else f" or of {self._folder}"
    raise ValueError(
      f"the task is {name!r}{near}, expected a task, group or tag of lm-evaluation-harness{folder},"
      f" or an alias: {', '.join(aliases)}."
    )

  def load(self, name: str) -> dict[str, Any]:
    """Return tasks with their data by name: several for a group or tag.

    Raises:
      ValueError: the definition is wrong, or the data are unavailable.
    """
    own = name in self.own
    if own and "group" in (self._manager(True).task_index[name].cfg or {}):
      own = False  # a group may contain tasks of the harness, whose index takes seconds to build
    manager = self._manager(own)
    local = _is_local(name, manager.task_index)
    with contextlib.nullcontext() if local else hub.offline_if_unreachable(name):
      try:
        return manager.load([name])["tasks"]
      except Exception as e:  # the harness raises errors of any type
        if not local:
          raise
        where = manager.task_index[name].yaml_path
        raise ValueError(
          f"the task {name} of {where} cannot be loaded: {reason(e)}; correct the file."
        ) from e

  def _manager(self, own: bool):
    """Return the index of the folder: alone, or with the tasks of the harness."""
    if self._folder is None:
      return _harness()
    if own not in self._managers:
      make = package.load("lm_eval.tasks").TaskManager
      self._managers[own] = make(include_path=self._folder, include_defaults=not own)
    return self._managers[own]


@functools.cache
def _harness():
  """Return the index of the harness's own tasks."""
  return package.load("lm_eval.tasks").TaskManager()


def _check_folder(folder: pathlib.Path):
  """Raise ValueError unless a folder has definitions, all of which can be read."""
  files = sorted(folder.rglob("*.yaml"))
  if not files:
    missing = "has no .yaml file" if folder.is_dir() else "is not a folder"
    raise ValueError(
      f"--include_path={folder} {missing}: expected task definitions of lm-evaluation-harness."
    )
  for file in files:  # the harness skips a file that it cannot read
    try:
      package.load("lm_eval.tasks._yaml_loader").load_yaml(file, resolve_func=False)
    except Exception as e:  # of the YAML parser, or of a file that it includes
      raise ValueError(
        f"{file} is not a task definition of lm-evaluation-harness: {reason(e)}."
      ) from e


def _is_local(name: str, index: dict) -> bool:
  """Whether all data of a task, group or tag are files."""
  entry = index.get(name)
  if entry is None:
    return False
  cfg = entry.cfg or {}
  if "dataset_path" in cfg or "custom_dataset" in cfg:
    path = cfg.get("dataset_path")
    return path in (None, *_FILES) or pathlib.Path(str(path)).exists()
  members = cfg.get("task", []) if "group" in cfg else sorted(entry.tags)
  members = [members] if isinstance(members, str) else members
  return bool(members) and all(isinstance(x, str) and _is_local(x, index) for x in members)


def reason(error: BaseException) -> str:
  """Return the first line of the message of an error's first cause."""
  while error.__cause__ is not None:
    error = error.__cause__
  lines = str(error).strip().splitlines()
  return lines[0][:200].rstrip(".") if lines else type(error).__name__
