"""How every command starts: its flags, all of them in `--help`, and its errors in one line."""

import sys
from collections.abc import Callable

from absl import app, flags, logging


def module_name() -> str:
  """The module that was started, as after `python -m`."""
  spec = sys.modules["__main__"].__spec__
  return spec.name.removesuffix(".__main__") if spec else sys.argv[0]


def parse(argv: list[str]) -> list[str]:
  """Flags as absl parses them."""
  return app._register_and_parse_flags_with_usage(argv)


def run(
  main: Callable[[], None],
  expected: tuple[type[Exception], ...] = (ValueError, FileNotFoundError),
  parse: Callable[[list[str]], list[str]] = parse,
):
  """Runs a command without positional arguments.

  Args:
    expected: errors that tell what was wrong in a sentence; shown as `name: sentence`, exit code 1.
    parse: reads the flags; `config_file.parse` for commands with `--config`.
  """
  name = module_name().rsplit(".", 1)[-1]
  _show_flags_of_imports()

  def start(argv):
    if len(argv) > 1:
      raise SystemExit(f"{name}: unexpected argument {argv[1]!r}; see --help")
    logging.set_verbosity(logging.WARNING)  # jax tells of missing backends, orbax of every save
    try:
      main()
    except expected as e:
      raise SystemExit(f"{name}: {e}") from e

  app.run(start, flags_parser=parse)


def _show_flags_of_imports():
  """absl's --help shows the main module's flags; here also those of the modules that it imports."""
  for module, defined in flags.FLAGS.flags_by_module_dict().items():
    if module.startswith("experiments."):
      for flag in defined:
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
