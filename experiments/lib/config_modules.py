"""Find and import what `--config` names: a module of experiments/configs, or any Python file.

`train` and `sweep` accept the same values: `mqar`, `experiments/configs/mqar.py`, `/any/table.py`;
for `train` an argument of get_config may follow after a colon (`lm:deltanet-340m`).
"""

import importlib
import importlib.util
import pathlib
import pkgutil
import traceback
from types import ModuleType

from deltanet_jax import plugins
from deltanet_jax.config import nearest
from experiments import configs

FOLDER = pathlib.Path(configs.__file__).parent


def find(value: str) -> pathlib.Path:
  """Resolve a name in experiments/configs, or a path, to an existing file.

  Raises:
    ValueError: there is no such file; the message lists the names in experiments/configs.
  """
  if value.endswith(".py") or "/" in value:
    if not pathlib.Path(value).is_file():
      builtin = FOLDER / pathlib.Path(value).name
      if value == f"experiments/configs/{builtin.name}" and builtin.is_file():
        return builtin  # of the installed package: the working directory is not the repository
      raise ValueError(f"there is no such file: {value!r}")
    return pathlib.Path(value)
  names = [module.name for module in pkgutil.iter_modules([str(FOLDER)])]
  if value not in names:
    raise ValueError(
      f"there is no config {value!r}{nearest(value, names)}; expected the path of a Python file or"
      f" a name in experiments/configs: {', '.join(names)}."
    )
  return FOLDER / f"{value}.py"


def is_builtin(path: pathlib.Path) -> bool:
  """Whether the file is in experiments/configs."""
  return path.resolve().parent == FOLDER.resolve()


def load(path: pathlib.Path) -> ModuleType:
  """Import a config file.

  Raises:
    ValueError: the import failed; the message names file and line.
  """
  try:
    if is_builtin(path):
      return importlib.import_module(f"{configs.__name__}.{path.stem}")
    for folder in (pathlib.Path.cwd(), path.parent):  # modules that the file imports
      plugins.search(folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None:
      raise ValueError(f"{path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
  except Exception as e:
    raise ValueError(located(e, path)) from e


def located(error: Exception, path: pathlib.Path) -> str:
  """The error as one sentence, with the line of `path` that raised it."""
  if isinstance(error, SyntaxError):
    return f"{error.filename}, line {error.lineno}: {error.msg}."
  frames = traceback.extract_tb(error.__traceback__)
  lines = [x.lineno for x in frames if pathlib.Path(x.filename).resolve() == path.resolve()]
  line = f", line {lines[-1]}" if lines else ""
  return f"{path}{line}: {type(error).__name__}: {str(error).rstrip('.')}."


def names_with(attribute: str) -> list[str]:
  """Modules of experiments/configs that define `attribute`: get_config, or ROWS of a sweep."""
  modules = [module.name for module in pkgutil.iter_modules([str(FOLDER)])]
  return [name for name in modules if hasattr(load(FOLDER / f"{name}.py"), attribute)]
