"""The paper's table 2: DeltaNet with 3B parameters and 10^12 tokens, compared with other models.

python -m experiments.train --config=lm_3b:deltanet --workdir=DIR \
  --config.data.corpus=CORPUS --config.mesh.fsdp=64
python -m experiments.evaluate --workdir=DIR --tasks=table2 --paper_row=deltanet-3b

3021.7M parameters, 1.8e+22 FLOP: 12,600 hours of an H100 at 40 % of 989 TFLOP/s. Zero-shot, in
percent: ARC (mean of the normalized accuracies of both) 60.4, HellaSwag 72.8, OBQA 41.0, PIQA 78.5,
WinoGrande 65.7, MMLU 40.7, average 59.8. It was not trained here.

The paper says only that settings are those of PowerLM-3B. Shape (width 2560, 36 layers, heads of
128), batch size (2^21 tokens), warm-up and cosine schedule here extend the paper's 1.3B recipe.
"""

from deltanet_jax.config import TrainConfig
from experiments.configs import lm
from experiments.lib.paper_tables import TABLE2, paper_row

SIZE = "3b"
PAPER = {"deltanet": paper_row(TABLE2, 60.4, 72.8, 41.0, 78.5, 65.7, 40.7)}
# Other models of the paper's table, without a config here.
OTHERS = {
  "Llama-3.2-3B": paper_row(TABLE2, 59.1, 73.6, 43.4, 77.5, 69.2, 54.1),
  "PowerLM-3B": paper_row(TABLE2, 60.5, 74.6, 43.6, 79.9, 70.0, 45.0),
  "RecurrentGemma-2B": paper_row(TABLE2, 57.0, 71.1, 42.0, 78.2, 67.6, 31.8),
  "RWKV-6-3B": paper_row(TABLE2, 49.5, 68.6, 40.6, 76.8, 65.4, 28.4),
  "Mamba-2.7B": paper_row(TABLE2, 50.3, 65.3, 39.4, 75.8, 63.1, 26.1),
}


def get_config(name: str = "deltanet") -> TrainConfig:
  return lm.row(name, PAPER, SIZE)
