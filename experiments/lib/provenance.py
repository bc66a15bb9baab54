"""Where a result comes from: written into every results file."""

import datetime
import os
import pathlib
import platform
import subprocess

import jax


def describe() -> dict:
  """Machine, versions, commit and date of this run."""
  return dict(
    machine=_machine(),
    device=jax.devices()[0].device_kind,
    backend=jax.default_backend(),
    jax=jax.__version__,
    python=platform.python_version(),
    commit=_commit(),
    date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
  )


def _machine():
  cpu = platform.processor() or platform.machine()
  info = pathlib.Path("/proc/cpuinfo")
  if info.exists():
    names = [
      x.split(":", 1)[1] for x in info.read_text().splitlines() if x.startswith("model name")
    ]
    cpu = names[0].strip() if names else cpu
  return f"{cpu}, {os.cpu_count()} cores"


def _commit():
  """The checked out commit, marked where files differ from it; "unknown" outside a checkout."""
  here = pathlib.Path(__file__).parent

  def git(*words):
    done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None

  commit = git("rev-parse", "--short=12", "HEAD")
  if not commit:
    return "unknown"
  return commit + ("-modified" if git("status", "--porcelain", "-uno") else "")
