"""Entry point of every command: flags, complete `--help`, errors and Ctrl-C in one line."""

import signal
import sys
from collections.abc import Callable

from absl import app, flags, logging

from deltanet_jax import cli
from deltanet_jax.host_memory import keep_freed_memory
from experiments.lib.exit_codes import INTERRUPTED


def module_name() -> str:
  """The module that was started, as written after `python -m`."""
  spec = sys.modules["__main__"].__spec__
  return spec.name.removesuffix(".__main__") if spec else sys.argv[0]


def parse(argv: list[str]) -> list[str]:
  """Parse flags with absl."""
  return app._register_and_parse_flags_with_usage(argv)


def sentence(error: Exception) -> str:
  """The message of an error; for a system error, the file and the reason."""
  if isinstance(error, OSError) and error.errno is not None:
    what = f"{error.filename} cannot be read or written" if error.filename else "input or output"
    return f"{what}: {error.strerror}."
  return str(error)


def run(
  main: Callable[[], None],
  expected: tuple[type[Exception], ...] = (ValueError,),
  parse: Callable[[list[str]], list[str]] = parse,
  keep_memory: bool = True,
  own_signals: bool = False,
):
  """Run a command that takes flags and no positional arguments.

  Ctrl-C prints one line and exits with code 130.

  Args:
    expected: exceptions whose message explains what was wrong, in addition to OSError: printed as
      `name: message` without a traceback, exit code 1.
    parse: parses the flags; `config_file.parse` for commands with `--config`.
    keep_memory: call `keep_freed_memory`; a benchmark may want to do without.
    own_signals: keep the signal handlers that `early_signals` installed, for commands that train.
  """
  name = module_name().rsplit(".", 1)[-1]
  _show_flags_of_imports()
  main_module = sys.modules["__main__"]
  if main_module.__doc__:  # examples as the user types them, `deltanet train` or `python -m ...`
    main_module.__doc__ = main_module.__doc__.replace("python -m experiments.", cli.prefix)

  def start(argv):
    if len(argv) > 1:
      raise SystemExit(f"{name}: unexpected argument {argv[1]!r}; see --help")
    if keep_memory:
      keep_freed_memory()
    logging.set_verbosity(logging.WARNING)  # jax logs missing backends, orbax every checkpoint
    if not own_signals:
      _reset_signals()
    try:
      main()
    except (*expected, OSError) as e:
      raise SystemExit(f"{name}: {sentence(e)}") from e
    except KeyboardInterrupt as e:
      print(f"{name}: {str(e) or 'interrupted'}", file=sys.stderr)
      raise SystemExit(INTERRUPTED) from e

  app.run(start, flags_parser=parse)


def _reset_signals():
  """Let Ctrl-C raise KeyboardInterrupt, so that temporary files are removed."""
  for number, default in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGTERM, signal.SIG_DFL),
  ):
    # Shells let background jobs ignore Ctrl-C: keep that.
    if signal.getsignal(number) is not signal.SIG_IGN:
      signal.signal(number, default)


def _show_flags_of_imports():
  """Add the flags of imported modules to --help: absl shows only those of the main module."""
  for module, defined in flags.FLAGS.flags_by_module_dict().items():
    if module.startswith("experiments."):
      for flag in defined:
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
