"""List all presets: parameters, decode state, the paper's state expansion, FLOP per token.

python -m experiments.models
python -m experiments.models --match=1.3b --length=4096
python -m experiments.models --mixers
python -m experiments.models --mixers --markdown
"""

from experiments.lib import early_signals  # noqa: F401, before imports that take seconds

# isort: split
from absl import flags

from deltanet_jax.mixers import MIXERS, register_installed
from deltanet_jax.models import PRESETS, preset, summarize
from experiments.lib import app, import_flag, mixer_table

_MATCH = flags.DEFINE_string("match", "", "Only presets, or mixers, whose name contains this.")
_LENGTH = flags.DEFINE_integer(
  "length", 2048, "Sequence length, also of the KV cache of attention.", lower_bound=1
)
_MIXERS = flags.DEFINE_bool("mixers", False, "List mixers and their formulas instead of presets.")
_MARKDOWN = flags.DEFINE_bool("markdown", False, "Print the table of --mixers as Markdown.")


def show_mixers(names):
  print((mixer_table.markdown if _MARKDOWN.value else mixer_table.text)(names), end="")


def show_presets(names):
  print(
    f"{'preset':26}{'parameters':>16}{'state elements':>16}{'state exp.':>12}{'MFLOP/token':>13}"
  )
  for name in names:
    s = summarize(preset(name), _LENGTH.value)
    expansion = "N/A" if s.state_expansion is None else f"{s.state_expansion:g}x"
    print(f"{name:26}{s.parameters:>16,}{s.state:>16,}{expansion:>12}{s.flops / 1e6:>13,.1f}")


def main():
  import_flag.import_modules()
  register_installed()
  names = [name for name in (MIXERS if _MIXERS.value else PRESETS) if _MATCH.value in name]
  if not names:
    raise ValueError(f"no name contains {_MATCH.value!r}.")
  if _MARKDOWN.value and not _MIXERS.value:
    raise ValueError("--markdown needs --mixers: set both.")
  (show_mixers if _MIXERS.value else show_presets)(names)


if __name__ == "__main__":
  app.run(main)
