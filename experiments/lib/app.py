"""How every command starts: its flags, all of them in `--help`, and its errors in one line."""

import sys
from collections.abc import Callable

from absl import app, flags, logging

from deltanet_jax.host_memory import keep_freed_memory


def module_name() -> str:
  """The module that was started, as after `python -m`."""
  spec = sys.modules["__main__"].__spec__
  return spec.name.removesuffix(".__main__") if spec else sys.argv[0]


def parse(argv: list[str]) -> list[str]:
  """Flags as absl parses them."""
  return app._register_and_parse_flags_with_usage(argv)


def sentence(error: Exception) -> str:
  """What an error says; one of the system names the file and the reason."""
  if isinstance(error, OSError) and error.errno is not None:
    what = f"{error.filename} cannot be read or written" if error.filename else "input or output"
    return f"{what}: {error.strerror}."
  return str(error)


def run(
  main: Callable[[], None],
  expected: tuple[type[Exception], ...] = (ValueError,),
  parse: Callable[[list[str]], list[str]] = parse,
  keep_memory: bool = True,
):
  """Runs a command without positional arguments.

  Args:
    expected: errors that tell what was wrong in a sentence; shown as `name: sentence`, exit code 1.
      So are those of files, like a full disk.
    parse: reads the flags; `config_file.parse` for commands with `--config`.
    keep_memory: see `keep_freed_memory`; a benchmark may want to choose.
  """
  name = module_name().rsplit(".", 1)[-1]
  _show_flags_of_imports()

  def start(argv):
    if len(argv) > 1:
      raise SystemExit(f"{name}: unexpected argument {argv[1]!r}; see --help")
    if keep_memory:
      keep_freed_memory()
    logging.set_verbosity(logging.WARNING)  # jax tells of missing backends, orbax of every save
    try:
      main()
    except (*expected, OSError) as e:
      raise SystemExit(f"{name}: {sentence(e)}") from e

  app.run(start, flags_parser=parse)


def _show_flags_of_imports():
  """absl's --help shows the main module's flags; here also those of the modules that it imports."""
  for module, defined in flags.FLAGS.flags_by_module_dict().items():
    if module.startswith("experiments."):
      for flag in defined:
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
