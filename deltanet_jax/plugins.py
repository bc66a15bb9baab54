"""Extensions of other packages: import paths (`module:name`), entry points and modules by name.

A mixer, task or evaluator of the user's is found by its import path, or by the name of an entry
point in the group `deltanet_jax.mixers`, `deltanet_jax.tasks` or `deltanet_jax.evaluators`.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import pathlib
import sys
import traceback
from types import ModuleType
from typing import Any

from deltanet_jax.config import nearest

GROUPS = ("mixers", "tasks", "evaluators")
MAIN = "__main__"


def import_path(thing: Any) -> str:
  """Return `module:name` of a class or function.

  The module is a name that can be imported, the absolute path of a file that was executed under
  another name (a config file), or `__main__` for a script.
  """
  name, module = thing.__qualname__, thing.__module__
  if module == MAIN:
    spec = getattr(sys.modules[MAIN], "__spec__", None)
    return f"{spec.name if spec else MAIN}:{name}"
  found = sys.modules.get(module)
  if getattr(found, name.partition(".")[0], None) is not None:
    return f"{module}:{name}"
  members = [thing, *vars(thing).values()] if isinstance(thing, type) else [thing]
  files = [x.__code__.co_filename for x in members if hasattr(x, "__code__")]
  return f"{os.path.abspath(files[0]) if files else module}:{name}"


def search(folder: str | pathlib.Path):
  """Append a folder to sys.path, so that it is searched for modules after all others."""
  folder = os.path.abspath(folder)
  if folder not in map(os.path.abspath, sys.path):  # "" is the working directory
    sys.path.append(folder)


def import_module(name: str) -> ModuleType:
  """Import a module by name, or a Python file by path (`FOLDER/file.py`).

  A name is searched on sys.path and then in the working directory, which a console script does not
  have on sys.path.

  Raises:
    ValueError: there is no such module or file, or importing it fails.
  """
  if name.endswith(".py") or "/" in name:
    return _import_file(pathlib.Path(name))
  if not all(part.isidentifier() for part in name.split(".")):
    raise ValueError(
      f"{name!r} is not the name of a module: expected package.module, or the path of a .py file."
    )
  search(os.getcwd())
  importlib.invalidate_caches()  # the file may be newer than the last listing of its folder
  try:
    return importlib.import_module(name)
  except ModuleNotFoundError as e:
    if e.name is None or not f"{name}.".startswith(f"{e.name}."):
      raise ValueError(_failed(name, e)) from e
    raise ValueError(
      f"there is no module {name!r} on sys.path or in the working directory: add its folder to"
      " PYTHONPATH, or install its package."
    ) from e
  except Exception as e:
    raise ValueError(_failed(name, e)) from e


def _import_file(path: pathlib.Path) -> ModuleType:
  spec = importlib.util.spec_from_file_location(path.stem, path)
  if not path.is_file() or spec is None or spec.loader is None:
    raise ValueError(f"there is no Python file {str(path)!r}: expected a module or a .py file.")
  module = importlib.util.module_from_spec(spec)
  # Dataclasses look their module up while they are created. It is not left there: the name of a
  # file may be that of another module.
  before = sys.modules.get(path.stem)
  sys.modules[path.stem] = module
  try:
    spec.loader.exec_module(module)
  except Exception as e:
    raise ValueError(_failed(str(path), e)) from e
  finally:
    if before is None:
      sys.modules.pop(path.stem, None)
    else:
      sys.modules[path.stem] = before
  return module


def _failed(name: str, error: Exception) -> str:
  frame = traceback.extract_tb(error.__traceback__)[-1]
  line = "" if isinstance(error, SyntaxError) else f" ({frame.filename}, line {frame.lineno})"
  reason = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
  return f"importing {name} failed{line}: {reason}."


def load(path: str) -> Any:
  """Import what `module:name` names; the module may be the path of a Python file.

  Raises:
    ValueError: the module cannot be imported, or has no such name.
  """
  module, colon, name = path.rpartition(":")
  if not colon or not module or not name:
    raise ValueError(f"{path!r} is not an import path: expected module:name.")
  found: Any = import_module(module)
  for part in name.split("."):
    if not hasattr(found, part):
      raise ValueError(f"{module} has no {name!r}{nearest(name, dir(found))}: correct {path!r}.")
    found = getattr(found, part)
  return found


def entry_points(group: str) -> dict[str, importlib.metadata.EntryPoint]:
  """Return the entry points of installed packages in the group `deltanet_jax.<group>` by name."""
  found = importlib.metadata.entry_points(group=f"deltanet_jax.{group}")
  return {point.name: point for point in found}


def find(group: str, name: str) -> Any:
  """Import a task or an evaluator by its import path or by the name of an entry point.

  Args:
    group: of `GROUPS`.
    name: `module:name`, or the name of an entry point.

  Raises:
    ValueError: nothing has this name, or importing it fails.
  """
  if ":" in name:
    return load(name)
  points = entry_points(group)
  if name not in points:
    known = f", or an entry point: {', '.join(sorted(points))}" if points else ""
    raise ValueError(
      f"there is no {group.rstrip('s')} {name!r}{nearest(name, points)}; expected module:name"
      f"{known}."
    )
  return load_entry_point(points[name])


def load_entry_point(point: importlib.metadata.EntryPoint) -> Any:
  """Import what an entry point names; raise ValueError if that fails."""
  try:
    return point.load()
  except Exception as e:
    message = f"{type(e).__name__}: {e}".splitlines()[0].rstrip(".")
    raise ValueError(
      f"the entry point {point.name!r} of {point.group}, {point.value}, cannot be imported"
      f" ({message}): repair or uninstall its package."
    ) from e
