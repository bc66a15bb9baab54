"""Lists every preset: parameters, decode state, the paper's state expansion, cost per token.

python -m experiments.models
python -m experiments.models --match=1.3b --length=4096
"""

from absl import app, flags

from deltanet_jax.models import PRESETS, preset, summarize

_MATCH = flags.DEFINE_string("match", "", "Only presets whose name contains this.")
_LENGTH = flags.DEFINE_integer(
  "length", 2048, "Tokens per sequence: of training, and in attention's cache.", lower_bound=1
)


def main(_):
  names = [name for name in PRESETS if _MATCH.value in name]
  if not names:
    raise app.UsageError(f"no preset contains {_MATCH.value!r}")
  print(
    f"{'preset':26}{'parameters':>16}{'state numbers':>16}{'state exp.':>12}{'MFLOP/token':>13}"
  )
  for name in names:
    s = summarize(preset(name), _LENGTH.value)
    expansion = "N/A" if s.state_expansion is None else f"{s.state_expansion:g}x"
    print(f"{name:26}{s.parameters:>16,}{s.state:>16,}{expansion:>12}{s.flops / 1e6:>13,.1f}")


if __name__ == "__main__":
  app.run(main)
