"""The paper's table 1, first part: 340M parameters, 15 billion tokens of SlimPajama.

python -m experiments.train --config=lm_340m:deltanet --workdir=DIR \
  --config.data.corpus=CORPUS --config.mesh.fsdp=8
python -m experiments.evaluate --workdir=DIR --tasks=table1 --paper_row=deltanet-340m

CORPUS is the output of `experiments.prepare_data --tokenizer=mistral`. 2^19 tokens per update,
sequence length 2048, AdamW, warm-up of 0.5 billion tokens from 3e-5 to 3e-4, cosine decay to 3e-5,
weight decay 0.01, gradient clipping at 1.

| row              | parameters | state |    FLOP | H100 hours | Wiki. | LMB. | average | SWDE |
| ---------------- | ---------: | ----: | ------: | ---------: | ----: | ---: | ------: | ---: |
| transformer      |     373.9M |     – | 3.5e+19 |         25 | 28.39 | 42.7 |    41.2 | 42.2 |
| retnet           |     380.2M |   512 | 3.4e+19 |         24 | 32.33 | 49.2 |    41.0 | 13.3 |
| mamba            |     385.6M |    64 | 3.2e+19 |         23 | 28.39 | 39.7 |    41.8 | 12.4 |
| gla              |     374.5M |   128 | 3.2e+19 |         22 | 28.65 | 43.4 |    41.5 | 18.6 |
| gla-conv         |     374.7M |   128 | 3.2e+19 |         22 | 29.47 | 45.5 |    41.8 | 24.0 |
| deltanet-noconv  |     374.1M |   128 | 3.2e+19 |         23 | 29.08 | 50.9 |    41.3 | 24.6 |
| deltanet         |     374.4M |   128 | 3.2e+19 |         23 | 28.24 | 37.4 |    42.1 | 26.4 |
| deltanet-sliding |     374.1M |     – | 3.4e+19 |         24 | 27.06 | 38.2 |    42.1 | 39.3 |
| deltanet-global  |     374.3M |     – | 3.2e+19 |         23 | 27.51 | 35.0 |    42.1 | 42.9 |

State: elements per layer, divided by the width. FLOP: all updates (forward and backward pass are
three forward passes), without rematerialization; hours of one H100 at 40 % of its 989 TFLOP/s.
Perplexities of WikiText and LAMBADA. None of these models was trained here.
"""

from deltanet_jax.config import TrainConfig
from experiments.configs import lm
from experiments.lib.paper_tables import TABLE1, paper_row

SIZE = "340m"
# Wikitext and LAMBADA perplexity, then percent.
PAPER = {
  "transformer": paper_row(
    TABLE1, 28.39, 42.69, 31.0, 63.3, 34.0, 50.4, 44.5, 24.2, 42.2, 22.1, 21.4
  ),
  "retnet": paper_row(TABLE1, 32.33, 49.19, 28.6, 63.5, 33.5, 52.5, 44.5, 23.4, 13.3, 27.6, 2.9),
  "mamba": paper_row(TABLE1, 28.39, 39.66, 30.6, 65.0, 35.4, 50.1, 46.3, 23.6, 12.4, 23.0, 2.1),
  "gla": paper_row(TABLE1, 28.65, 43.35, 30.3, 64.8, 34.5, 51.4, 45.1, 22.7, 18.6, 27.2, 8.1),
  "gla-conv": paper_row(TABLE1, 29.47, 45.53, 31.3, 65.1, 33.8, 51.6, 44.4, 24.6, 24.0, 24.7, 7.3),
  "deltanet-noconv": paper_row(
    TABLE1, 29.08, 50.87, 30.0, 63.6, 33.6, 51.7, 46.0, 23.0, 24.6, 26.9, 4.5
  ),
  "deltanet": paper_row(TABLE1, 28.24, 37.37, 32.1, 64.8, 34.3, 52.2, 45.8, 23.5, 26.4, 28.9, 12.8),
  "deltanet-sliding": paper_row(
    TABLE1, 27.06, 38.17, 33.4, 64.0, 35.3, 50.9, 45.9, 23.2, 39.3, 32.5, 18.8
  ),
  "deltanet-global": paper_row(
    TABLE1, 27.51, 35.04, 33.5, 64.0, 34.5, 51.7, 46.0, 23.3, 42.9, 32.1, 23.1
  ),
}


def get_config(name: str = "deltanet") -> TrainConfig:
  return lm.row(name, PAPER, SIZE)
