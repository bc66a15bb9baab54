"""`python -m experiments.train` with one thing arranged, which the first word names.

stop_after=N stops, and saves, after exactly this update; fail_read has every read of arrays fail.
"""

import errno
import runpy
import sys

import orbax.checkpoint as ocp

from deltanet_jax.train.preemption import Stop


def fail(*_, **__):
  raise OSError(errno.EIO, "Input/output error")


if __name__ == "__main__":
  arranged = sys.argv.pop(1)
  if arranged == "fail_read":
    ocp.Checkpointer.restore = fail
  else:
    Stop.asked = lambda _, step: step == int(arranged.removeprefix("stop_after="))
  runpy.run_module("experiments.train", run_name="__main__", alter_sys=True)
