"""Continues prompts of token ids with a public checkpoint or a preset of random weights.

python -m experiments.generate --checkpoint=FOLDER --prompt=1,450,4996 --max_new=64
python -m experiments.generate --preset=deltanet-tiny --prompt=5,9 --prompt=7 --temperature=0.8
"""

import time

from absl import app, flags

from deltanet_jax.generate import Sampling, generate
from deltanet_jax.interop import load_fla
from deltanet_jax.models import PRESETS, build, preset

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Folder with config.json and safetensors.")
_PRESET = flags.DEFINE_enum("preset", "deltanet-tiny", PRESETS, "Model without a checkpoint.")
_PROMPTS = flags.DEFINE_multi_string(
  "prompt", ["1"], "Token ids with commas; repeat for more rows."
)
_MAX_NEW = flags.DEFINE_integer("max_new", 32, "Tokens to add at most.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy.", lower_bound=0.0)
_TOP_K = flags.DEFINE_integer("top_k", None, "Only the k most likely tokens.", lower_bound=1)
_TOP_P = flags.DEFINE_float("top_p", None, "Only tokens that hold this much probability.")
_STOP = flags.DEFINE_multi_integer("stop", [], "Token id that ends a row.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the sampling.")


def main(_):
  model = load_fla(_CHECKPOINT.value) if _CHECKPOINT.value else build(preset(_PRESET.value))
  prompts = [[int(token) for token in prompt.split(",")] for prompt in _PROMPTS.value]
  how = Sampling(temperature=_TEMPERATURE.value, top_k=_TOP_K.value, top_p=_TOP_P.value)
  start = time.perf_counter()
  rows = generate(model, prompts, _MAX_NEW.value, sampling=how, stop=_STOP.value, seed=_SEED.value)
  seconds = time.perf_counter() - start
  for prompt, row in zip(prompts, rows):
    print(f"{prompt} -> {row}")
  print(f"{sum(map(len, rows))} tokens in {seconds:.1f} s, compilation included")


if __name__ == "__main__":
  app.run(main)
