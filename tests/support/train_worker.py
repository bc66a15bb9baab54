"""`python -m experiments.train` with a simulated fault, named by the first argument.

stop_after=N stops and saves after exactly update N; fail_read makes every checkpoint read fail.
"""

import errno
import runpy
import sys

import orbax.checkpoint as ocp

from deltanet_jax.train.preemption import Stop


def fail(*_, **__):
  raise OSError(errno.EIO, "Input/output error")


if __name__ == "__main__":
  fault = sys.argv.pop(1)
  if fault == "fail_read":
    ocp.Checkpointer.restore = fail
  else:
    Stop.asked = lambda _, step: step == int(fault.removeprefix("stop_after="))
  runpy.run_module("experiments.train", run_name="__main__", alter_sys=True)
