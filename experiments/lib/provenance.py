"""Where a result comes from: machine, versions, commit, date, command."""

import datetime
import hashlib
import os
import pathlib
import platform
import subprocess
import sys

import jax

from experiments.lib import app

CHECKOUT = pathlib.Path(__file__).parents[2]
_PACKAGES = ("deltanet_jax", "pallas_kernels", "experiments")


def describe() -> dict:
  """Machine, versions, commit and date; `modified` is there, and true, if the code is no commit."""
  found = commit()
  origin = dict(
    machine=_machine(),
    device=jax.devices()[0].device_kind,
    backend=jax.default_backend(),
    jax=jax.__version__,
    python=platform.python_version(),
    commit=found or "unknown",
    date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
  )
  return origin | (dict(modified=True) if found is None or modified_code() else {})


def commit(checkout: pathlib.Path = CHECKOUT) -> str | None:
  """The commit that is checked out; None without a checkout."""
  top = _git(checkout, "rev-parse", "--show-toplevel")
  if top is None or pathlib.Path(top) != checkout.resolve():
    return None  # a package installed into somebody else's checkout
  return _git(checkout, "rev-parse", "--short=12", "HEAD")


def code(checkout: pathlib.Path = CHECKOUT) -> str:
  """A short hash of the library's source: what a model computes and how it is trained.

  Of the files as they are, committed or not. Documents and commands are not in it.
  """
  hashed = hashlib.sha256()
  for package in ("deltanet_jax", "pallas_kernels"):
    for path in sorted((checkout / package).rglob("*.py")):
      hashed.update(f"{path.relative_to(checkout).as_posix()}\0".encode())
      hashed.update(path.read_bytes())
  return hashed.hexdigest()[:12]


def modified_code(checkout: pathlib.Path = CHECKOUT) -> list[str]:
  """Files that differ from the commit, results and documents apart; new modules count."""
  changed = _git(
    checkout, "status", "--porcelain", "-uno", "--", ".", ":!experiments/results", ":!*.md"
  )
  names = [line[2:].strip() for line in (changed or "").splitlines()]
  modules = [f"{package}/*.py" for package in _PACKAGES]
  new = _git(checkout, "ls-files", "--others", "--exclude-standard", "--", *modules)
  return names + (new or "").splitlines()


def command(checkout: pathlib.Path = CHECKOUT) -> str:
  """The command line as a person types it; of a path outside the checkout only the last name."""

  def hide(word):
    flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    path = pathlib.Path(value).expanduser()
    inside = pathlib.Path(os.path.abspath(path)).is_relative_to(checkout.resolve())
    is_path = "/" in value or "\\" in value
    return flag + equals + (value if inside or not is_path else f".../{path.name}")

  return " ".join(["python", "-m", app.module_name(), *map(hide, sys.argv[1:])])


def _machine():
  cpu = platform.processor() or platform.machine()
  info = pathlib.Path("/proc/cpuinfo")
  if info.exists():
    names = [
      x.split(":", 1)[1] for x in info.read_text().splitlines() if x.startswith("model name")
    ]
    cpu = names[0].strip() if names else cpu
  return f"{cpu}, {os.cpu_count()} cores"


def _git(checkout, *words):
  """What git says, or None where it fails or there is none."""
  try:
    done = subprocess.run(["git", *words], cwd=checkout, capture_output=True, text=True)
  except FileNotFoundError:
    return None
  return done.stdout.strip("\n") if done.returncode == 0 else None
