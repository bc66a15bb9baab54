"""Training throughput by sequence length, at constant tokens per batch (the paper's figure).

  python -m experiments.bench.throughput
  python -m experiments.bench.throughput --model=deltanet --model=transformer --length=2048

Times the update of `experiments.train` on the available device; the default models are small enough
for a CPU. Models are timed alternately, and the fastest of several rounds counts. The paper's
models and lengths, for an accelerator: --width=2048 --depth=24 --dtype=bfloat16 --length=2048 ...
"""

from experiments.lib import early_signals  # noqa: F401, before imports that take seconds

# isort: split
import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from tqdm import tqdm

from deltanet_jax.config import DataConfig, ModelConfig, TrainConfig
from deltanet_jax.mixers.attention import AttentionConfig
from deltanet_jax.mixers.deltanet import DeltaNetConfig
from deltanet_jax.mixers.gla import GLAConfig
from deltanet_jax.mixers.mamba import MambaConfig
from deltanet_jax.mixers.retnet import RetNetConfig
from deltanet_jax.train.step import make_trainer
from experiments.bench.timing import best_seconds
from experiments.lib import app, records
from experiments.lib.tables import table

_WINDOW = 2048
# Name -> mixers, and the pattern of layers, which is repeated.
MODELS = {
  "transformer": (dict(attention=AttentionConfig(head_size=64)), ("attention",)),
  "mamba": (dict(mamba=MambaConfig()), ("mamba",)),
  "gla": (dict(gla=GLAConfig(heads=2)), ("gla",)),
  "retnet": (dict(retnet=RetNetConfig(heads=2)), ("retnet",)),
  "deltanet": (dict(deltanet=DeltaNetConfig()), ("deltanet",)),
  "deltanet-sliding": (
    dict(deltanet=DeltaNetConfig(), window=AttentionConfig(head_size=64, window=_WINDOW)),
    ("deltanet", "window"),
  ),
  "deltanet-global": (
    dict(deltanet=DeltaNetConfig(), attention=AttentionConfig(head_size=64)),
    ("deltanet", "attention"),
  ),
}
_MODELS = flags.DEFINE_multi_enum("model", list(MODELS), list(MODELS), "Models; repeatable.")
_LENGTHS = flags.DEFINE_multi_integer(
  "length", [512, 1024, 2048, 4096, 8192, 16384], "Sequence length; repeatable."
)
_TOKENS = flags.DEFINE_integer("tokens", 16384, "Tokens per batch, for all lengths.", lower_bound=1)
_WIDTH = flags.DEFINE_integer("width", 256, "Width of the models.", lower_bound=64)
_DEPTH = flags.DEFINE_integer("depth", 2, "Number of layers.", lower_bound=2)
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Dtype of activations.")
_ROUNDS = flags.DEFINE_integer(
  "rounds", 3, "Timed rounds, of which the fastest counts.", lower_bound=1
)


def config(name: str, length: int) -> TrainConfig:
  """Without gradient accumulation; Mamba has no MLP and twice the layers, as in the paper."""
  mixers, pattern = MODELS[name]
  mamba = name == "mamba"
  model = ModelConfig(
    vocab=1024,
    width=_WIDTH.value,
    depth=_DEPTH.value * (1 + mamba),
    mixers=mixers,
    pattern=pattern,
    mlp_ratio=0.0 if mamba else 8 / 3,
    tied=True,
    dtype=_DTYPE.value,
  )
  batch = _TOKENS.value // length
  return TrainConfig(
    model=model, data=DataConfig(length=length, batch=batch), tokens=_TOKENS.value, loss_chunk=1024
  )


class Update:
  """A compiled update; every call continues from the state of the previous one, as in training."""

  def __init__(self, cfg: TrainConfig):
    trainer = make_trainer(cfg)
    self._run = trainer.lower_update().compile()
    self.temporary_bytes = self._run.memory_analysis().temp_size_in_bytes
    self._state = jax.jit(trainer.init)(0)
    rng = np.random.default_rng(0)
    tokens = rng.integers(cfg.model.vocab, size=(cfg.data.batch, cfg.data.length + 1))
    self._batch = dict(
      tokens=jnp.asarray(tokens[:, :-1], jnp.int32),
      targets=jnp.asarray(tokens[:, 1:], jnp.int32),
      segment_ids=jnp.zeros((cfg.data.batch, cfg.data.length), jnp.int32),
      mask=jnp.ones((cfg.data.batch, cfg.data.length), bool),
    )

  def __call__(self):
    self._state, metrics = self._run(self._state, self._batch, jnp.float32(1e-3))
    return metrics["loss"]


def main():
  for length in _LENGTHS.value:
    if _TOKENS.value % length:
      raise ValueError(f"--tokens={_TOKENS.value} is no multiple of --length={length}.")
  out = records.open("throughput")
  size = dict(width=_WIDTH.value, depth=_DEPTH.value, dtype=_DTYPE.value, tokens=_TOKENS.value)
  cases = [(name, length) for length in _LENGTHS.value for name in _MODELS.value]
  keys = {case: dict(model=case[0], length=case[1], **size) for case in cases}
  if all(map(out.has, keys.values())):
    print(f"this commit has all records: {out.path}; table: python -m experiments.plots")
    return
  lines = []
  for length in tqdm(_LENGTHS.value, unit="length"):
    # One length at a time: compared models are timed in the same minute, and fit into memory.
    updates = {name: Update(config(name, length)) for name in _MODELS.value}
    for name, update in updates.items():
      if not np.isfinite(update()):
        raise ValueError(f"the loss of {name} is non-finite.")
    seconds, rounds = best_seconds(updates, _ROUNDS.value, 0)
    for name, update in updates.items():
      metrics = dict(
        tokens_per_second=_TOKENS.value / seconds[name],
        seconds=seconds[name],
        temporary_bytes=update.temporary_bytes,
        rounds=rounds,
      )
      out.write(keys[name, length], metrics)
      cells = [f"{metrics['tokens_per_second']:,.0f}", f"{update.temporary_bytes / 2**20:,.0f}"]
      lines.append([name, f"{length:,} x {_TOKENS.value // length}", *cells])
    del updates
    jax.clear_caches()
  print(table(["model", "length x batch", "tokens/s", "temporary MiB"], lines))
  print(f"all records: {out.path}; table: python -m experiments.plots")


if __name__ == "__main__":
  app.run(main)
