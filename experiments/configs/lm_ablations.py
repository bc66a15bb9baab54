"""The paper's table 1, last part: norm and feature map of DeltaNet's q and k, 340M parameters.

python -m experiments.train --config=lm_ablations:l2-relu --workdir=DIR \
  --config.data.corpus=CORPUS --config.mesh.fsdp=8
python -m experiments.evaluate --workdir=DIR --tasks=table1 --paper_row=l2-relu-340m

Each is lm_340m:deltanet, 374.4M parameters and 3.2e+19 FLOP (23 hours of an H100 at 40 %), with
another norm or feature map.

| row     | norm | feature map | Wiki. |  LMB. | average | SWDE | SQuAD |  FDA |
| ------- | ---- | ----------- | ----: | ----: | ------: | ---: | ----: | ---: |
| l1-elu  | L1   | 1 + ELU     | 31.12 | 55.96 |    40.1 | 14.5 |  23.9 |  6.2 |
| l2-elu  | L2   | 1 + ELU     | 28.03 | 37.62 |    42.1 | 23.8 |  28.6 | 13.1 |
| l2-relu | L2   | ReLU        | 28.75 | 43.53 |    40.9 | 27.2 |  26.7 |  9.0 |
| l2-silu | L2   | SiLU        | 28.24 | 37.37 |    42.1 | 26.4 |  28.9 | 12.8 |

None of these models was trained here.
"""

import dataclasses

from deltanet_jax.config import TrainConfig
from experiments.configs import lm, lm_340m
from experiments.lib.paper_tables import TABLE1, paper_row

SIZE = "340m"
PAPER = {
  "l1-elu": paper_row(TABLE1, 31.12, 55.96, 26.3, 63.9, 33.0, 50.9, 44.3, 21.8, 14.5, 23.9, 6.2),
  "l2-elu": paper_row(TABLE1, 28.03, 37.62, 32.2, 65.7, 34.7, 51.8, 45.4, 22.5, 23.8, 28.6, 13.1),
  "l2-relu": paper_row(TABLE1, 28.75, 43.53, 30.2, 64.0, 33.9, 48.9, 45.6, 22.8, 27.2, 26.7, 9.0),
  "l2-silu": lm_340m.PAPER["deltanet"],  # the main model
}


def get_config(name: str = "l2-silu") -> TrainConfig:
  lm.check_row(name, PAPER)
  norm, activation = name.split("-")
  cfg = lm.training(f"deltanet-{SIZE}")
  mixer = cfg.model.mixers["deltanet"]
  cfg.model.mixers["deltanet"] = dataclasses.replace(mixer, norm=norm, activation=activation)
  return cfg
