"""Lists every preset: parameters, decode state, the paper's state expansion, cost per token.

python -m experiments.models
python -m experiments.models --match=1.3b --length=4096
python -m experiments.models --mixers
python -m experiments.models --mixers --markdown
"""

from absl import flags

from deltanet_jax.mixers import MIXERS
from deltanet_jax.models import PRESETS, preset, summarize
from experiments.lib import app, mixer_table

_MATCH = flags.DEFINE_string("match", "", "Only presets, or mixers, whose name contains this.")
_LENGTH = flags.DEFINE_integer(
  "length", 2048, "Tokens per sequence: of training, and in attention's cache.", lower_bound=1
)
_MIXERS = flags.DEFINE_bool("mixers", False, "The mixers and their formulas instead of presets.")
_MARKDOWN = flags.DEFINE_bool("markdown", False, "The table of --mixers as Markdown.")


def show_mixers(names):
  print((mixer_table.markdown if _MARKDOWN.value else mixer_table.text)(names), end="")


def show_presets(names):
  print(
    f"{'preset':26}{'parameters':>16}{'state numbers':>16}{'state exp.':>12}{'MFLOP/token':>13}"
  )
  for name in names:
    s = summarize(preset(name), _LENGTH.value)
    expansion = "N/A" if s.state_expansion is None else f"{s.state_expansion:g}x"
    print(f"{name:26}{s.parameters:>16,}{s.state:>16,}{expansion:>12}{s.flops / 1e6:>13,.1f}")


def main():
  names = [name for name in (MIXERS if _MIXERS.value else PRESETS) if _MATCH.value in name]
  if not names:
    raise ValueError(f"no name contains {_MATCH.value!r}.")
  if _MARKDOWN.value and not _MIXERS.value:
    raise ValueError("--markdown is of the table of --mixers: give both.")
  (show_mixers if _MIXERS.value else show_presets)(names)


if __name__ == "__main__":
  app.run(main)
