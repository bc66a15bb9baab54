"""Sweeps of a user's table: the example of the README, several rows at once, failures, Ctrl-C."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time

import pytest

from experiments.lib import job_pool, sweep_spec
from experiments.lib.exit_codes import INTERRUPTED
from tests.support.training import ROOT

SECTION = (ROOT / "experiments/README.md").read_text().partition("### A sweep of your own")[2]
TABLE = re.search(r"```python\n(.*?)```", SECTION, re.DOTALL)[1]
COMMAND = re.search(r"```bash\n(.*?)```", SECTION, re.DOTALL)[1].strip()


def job(tmp_path, name, script):
  return job_pool.Job(name, ["sh", "-c", script], tmp_path / f"{name}.log")


def test_a_job_that_fails_does_not_stop_the_others(tmp_path):
  until = f"while [ ! -e {tmp_path}/c ]; do sleep 0.02; done; sleep 0.3; echo done"
  scripts = dict(a=until, b="echo no disk >&2; exit 3", c=f"touch {tmp_path}/c; echo done")
  jobs = [job(tmp_path, name, script) for name, script in scripts.items()]
  ended = []
  codes = job_pool.run(jobs, 2, lambda job, code, seconds: ended.append((job.name, code)))
  assert codes == dict(a=0, b=3, c=0) and ended == [("b", 3), ("c", 0), ("a", 0)]
  assert jobs[1].last_line() == "no disk" and jobs[2].last_line() == "done"


def test_ctrl_c_reaches_every_running_job_once(tmp_path):
  script = "trap 'echo saved; exit 130' INT; echo ready; while true; do sleep 0.05; done"
  jobs = [job(tmp_path, name, script) for name in "abc"]

  def interrupt():
    while not all(one.log.exists() and one.log.read_text() for one in jobs[:2]):
      time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)

  threading.Thread(target=interrupt).start()
  codes = []
  with pytest.raises(job_pool.StoppedError, match="SIGINT with 1 rows not started; the same") as e:
    job_pool.run(jobs, 2, lambda job, code, seconds: codes.append(code))
  assert e.value.code == INTERRUPTED and codes == [130, 130]
  assert [one.log.read_text() for one in jobs[:2]] == ["ready\nsaved\n"] * 2
  assert not jobs[2].log.exists()
  assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_each_job_has_its_own_gpu(tmp_path, monkeypatch):
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
  jobs = [job(tmp_path, name, "sleep 0.2; echo $CUDA_VISIBLE_DEVICES") for name in "ab"]
  job_pool.run(jobs, 2, lambda *_: None)
  assert {one.last_line() for one in jobs} == {"4", "6"}
  with pytest.raises(ValueError, match="names 2 devices, fewer than --jobs=3"):
    job_pool.run(jobs, 3, lambda *_: None)


def test_the_table_of_the_readme(tmp_path):
  (tmp_path / "rates.py").write_text(TABLE)
  assert len(TABLE.splitlines()) <= 25
  table = sweep_spec.load(str(tmp_path / "rates.py"))
  assert not table.builtin and [row.name for row in table.rows] == [
    "lr/0.001",
    "lr/0.003",
    "lr/0.01",
  ]
  made = table.rows[1].make({}, 0)
  made.config.validate()
  assert made.config.optimizer.learning_rate == 3e-3 and "validation_loss" in made.metric_names()


TINY = TABLE.replace("updates=100", "updates=2").replace("deltanet-tiny", "transformer-tiny")

# A row whose task fails after the sweep has started it.
FAILING = """

class Failing(StateTracking):
  def batch(self, *_):
    raise ValueError("the disk with the data is gone")


def fail(point, seed):
  made = make(1e-3, point, seed)
  task = Failing("parity", length=32, batch=16, seed=seed, validation_batches=2)
  return TrainingRun(made.config, task, made.evaluators)


ROWS = [Row(set="lr", key={"rate": "failing"}, make=fail, **METRIC), *ROWS[:2]]
"""


def start(tmp_path, command=COMMAND):
  words = [sys.executable, *shlex.split(command)[1:]]
  environment = os.environ | dict(PYTHONPATH=str(ROOT))
  streams = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
  return subprocess.Popen(words, cwd=tmp_path, env=environment, **streams)


def recorded(tmp_path):
  path = tmp_path / "my_results/rates/records.jsonl"
  return [json.loads(line)["key"]["rate"] for line in path.read_text().splitlines()]


def test_the_command_of_the_readme(tmp_path):
  """Two rows at once; a third fails, and is all that the second start trains."""
  (tmp_path / "rates.py").write_text(TINY + FAILING)
  first = start(tmp_path)
  output, errors = first.communicate()
  assert first.returncode == 1
  assert "sweep: 1 of 3 rows failed (lr/failing): see my_results/rates/logs" in errors
  failed = "lr/failing failed with exit code 1: sweep: the disk with the data is gone ("
  assert failed in output and "lr/0.001 ended (" in output
  assert recorded(tmp_path) == [0.001, 0.003]
  (tmp_path / "rates.py").write_text(TINY)
  second = start(tmp_path, f"{COMMAND} --rows=lr/0.001 --rows=lr/0.003")
  output, errors = second.communicate()
  assert second.returncode == 0, errors
  assert "0 rows to train" in output and "2 rows are done; records: my_results/rates/" in output
  assert re.search(r"\| lr/0.003 \| .* \| validation_loss \| 0\.\d+ \| +2 \|", output)


@pytest.mark.slow
def test_ctrl_c_stops_all_rows_with_a_checkpoint(tmp_path):
  table = TABLE.replace("updates=100", "updates=3000").replace("seed=seed,\n  )", "seed=seed,\n"
    "    log_every=1,\n  )")  # fmt: skip
  (tmp_path / "rates.py").write_text(table)
  process = start(tmp_path)
  runs = lambda: list(tmp_path.glob("my_results/rates/lr/*/*/metrics.jsonl"))
  deadline = time.monotonic() + 300
  while len(runs()) < 2 and time.monotonic() < deadline:
    time.sleep(0.5)
  process.send_signal(signal.SIGINT)
  output, errors = process.communicate(timeout=120)
  assert process.returncode == INTERRUPTED and "SIGINT with 1 rows not started" in errors
  assert len(re.findall("stopped: .*after step", output)) == 2
  steps = [p.name for run in runs() for p in (run.parent / "checkpoints").iterdir()]
  assert len(steps) == 2
