"""The console script `deltanet`: `deltanet train ...` runs `python -m experiments.train ...`."""

import ast
import contextlib
import difflib
import importlib.machinery
import pathlib
import runpy
import sys
from typing import NoReturn

from deltanet_jax import __version__
from deltanet_jax._extras import MissingExtraError

_ROOT = pathlib.Path(__file__).parents[1]  # site-packages, or the checkout
_FOLDER = _ROOT / "experiments"
_GROUPS = {"": "commands", "bench.": "benchmarks", "aot.": "AOT compilation for absent devices"}

# How the examples in a command's --help start.
prefix = "python -m experiments."


def commands() -> dict[str, pathlib.Path]:
  """Every command by name (`train`, `bench.kernel_speed`), with the file that is run.

  A command is a module of `experiments` that can be started; none is imported for this.
  """
  found = {}
  for path in sorted([*_FOLDER.glob("*.py"), *_FOLDER.glob("*/*.py")]):
    if '\nif __name__ == "__main__":' not in path.read_text() or path.stem.endswith("_worker"):
      continue
    parts = path.relative_to(_FOLDER).with_suffix("").parts
    found[".".join(part for part in parts if part != "__main__")] = path
  return found


def usage() -> str:
  """All commands with the first line of their docstring."""
  lines = ["usage: deltanet COMMAND [--flag=value ...]", "       deltanet COMMAND --help"]
  found = commands()
  for group, title in _GROUPS.items():
    own = {
      name: path for name, path in found.items() if name.rpartition(".")[0] == group.rstrip(".")
    }
    lines += ["", f"{title}:"] if own else []
    for name, path in own.items():
      summary = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0]
      lines.append(f"  {name:26} {summary}")
  return "\n".join(lines)


def main() -> NoReturn:
  """Run the command that the first argument names."""
  global prefix
  name, *arguments = sys.argv[1:] or ["--help"]
  if name in ("-h", "--help", "help"):
    with contextlib.suppress(BrokenPipeError):  # `deltanet --help | head`
      print(usage(), flush=True)
    raise SystemExit(0)
  if name == "--version":
    print(f"deltanet-jax {__version__}")
    raise SystemExit(0)
  known, name = commands(), name.replace("-", "_")
  if name not in known:
    near = difflib.get_close_matches(name, known, 1)
    hint = f" (nearest: {near[0]})" if near else ""
    raise SystemExit(f"deltanet: there is no command {name!r}{hint}; see deltanet --help")
  _import_own_experiments()
  prefix = "deltanet "
  sys.argv = [str(known[name]), *arguments]
  try:
    runpy.run_module(f"experiments.{name}", run_name="__main__", alter_sys=True)
  except MissingExtraError as e:
    raise SystemExit(f"deltanet: {e}") from e
  except SystemExit as e:
    if e.code == 1 and {"--help", "-h", "--helpfull", "--helpshort"} & set(arguments):
      raise SystemExit(0) from None  # absl ends help with 1
    raise
  raise SystemExit(0)


def _import_own_experiments():
  """Make `experiments` the package next to this one, not a folder of that name of the user's.

  A console script does not have the working directory on sys.path, but PYTHONPATH=. adds it. A path
  entry rather than an import hook: multiprocessing passes sys.path on to its workers.
  """
  found = importlib.machinery.PathFinder.find_spec("experiments")
  if found is None or found.origin != str(_FOLDER / "__init__.py"):
    sys.path.insert(0, str(_ROOT))
