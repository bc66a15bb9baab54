"""The paper's table 1, second part: 1.3B parameters, 100 billion tokens, as in lm_340m.py.

python -m experiments.train --config=lm_1_3b:deltanet --workdir=DIR \
  --config.data.corpus=CORPUS --config.mesh.fsdp=8
python -m experiments.evaluate --workdir=DIR --tasks=table1 --paper_row=deltanet-1.3b

2^21 tokens per update, sequence length 2048, AdamW, warm-up of 1 billion tokens from 3e-5 to 3e-4,
cosine decay to 3e-5, weight decay 0.01, gradient clipping at 1.

| row              | parameters | state |    FLOP | H100 hours | Wiki. | LMB. | average | SWDE |
| ---------------- | ---------: | ----: | ------: | ---------: | ----: | ---: | ------: | ---: |
| transformer      |    1364.3M |     – | 8.4e+20 |        589 | 16.85 | 13.4 |    50.9 | 66.6 |
| retnet           |    1351.7M |   512 | 8.1e+20 |        567 | 18.64 | 17.3 |    48.9 | 42.8 |
| mamba            |    1400.3M |    64 | 8.1e+20 |        567 | 17.06 | 13.9 |    50.0 | 41.4 |
| gla              |    1365.5M |   256 | 8.0e+20 |        560 | 17.22 | 14.5 |    51.0 | 50.6 |
| gla-conv         |    1365.9M |   256 | 8.0e+20 |        560 | 17.25 | 14.9 |    50.4 | 52.4 |
| deltanet         |    1365.7M |   128 | 8.0e+20 |        561 | 16.87 | 12.2 |    51.6 | 49.5 |
| deltanet-sliding |    1365.0M |     – | 8.2e+20 |        575 | 16.56 | 11.7 |    52.1 | 53.3 |
| deltanet-global  |    1365.6M |     – | 8.0e+20 |        563 | 16.55 | 12.4 |    51.8 | 71.0 |

Columns as in lm_340m.py. None of these models was trained here; the update was AOT-compiled for
8 H100.
"""

from deltanet_jax.config import TrainConfig
from experiments.configs import lm
from experiments.lib.paper_tables import TABLE1, paper_row

SIZE = "1.3b"
# Wikitext and LAMBADA perplexity, then percent.
PAPER = {
  "transformer": paper_row(
    TABLE1, 16.85, 13.44, 48.9, 70.8, 49.6, 53.6, 56.0, 26.5, 66.6, 31.5, 27.4
  ),
  "retnet": paper_row(TABLE1, 18.64, 17.27, 43.3, 70.0, 47.3, 52.5, 54.8, 25.6, 42.8, 34.7, 14.3),
  "mamba": paper_row(TABLE1, 17.06, 13.89, 46.2, 72.2, 40.1, 54.1, 59.0, 28.2, 41.4, 35.2, 6.2),
  "gla": paper_row(TABLE1, 17.22, 14.47, 46.9, 71.8, 49.8, 53.9, 57.2, 26.6, 50.6, 42.6, 19.9),
  "gla-conv": paper_row(TABLE1, 17.25, 14.92, 46.2, 70.6, 49.9, 53.0, 55.3, 27.0, 52.4, 37.4, 22.3),
  "deltanet": paper_row(TABLE1, 16.87, 12.21, 48.9, 71.2, 50.2, 53.6, 57.2, 28.3, 49.5, 37.4, 17.2),
  "deltanet-sliding": paper_row(
    TABLE1, 16.56, 11.74, 49.2, 71.8, 51.1, 52.8, 58.9, 28.8, 53.3, 43.3, 22.3
  ),
  "deltanet-global": paper_row(
    TABLE1, 16.55, 12.40, 48.8, 70.8, 50.7, 54.2, 58.4, 28.1, 71.0, 43.0, 29.8
  ),
}


def get_config(name: str = "deltanet") -> TrainConfig:
  return lm.row(name, PAPER, SIZE)
