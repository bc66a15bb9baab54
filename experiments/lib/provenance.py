"""Provenance of a result: machine, versions, commit, date, command, hash of the code."""

import datetime
import functools
import hashlib
import os
import pathlib
import platform
import subprocess
import sys

import jax

from deltanet_jax import __version__
from experiments.lib import app

CHECKOUT = pathlib.Path(__file__).parents[2]  # or site-packages, if installed from a wheel
INSTALLED = not (CHECKOUT / "pyproject.toml").is_file()
_PACKAGES = ("deltanet_jax", "pallas_kernels", "experiments")


def describe() -> dict:
  """Machine, versions, commit and date; `modified=True` is added for uncommitted code."""
  found = f"version {__version__}" if INSTALLED else commit()
  origin = dict(
    machine=_machine(),
    device=jax.devices()[0].device_kind,
    backend=jax.default_backend(),
    jax=jax.__version__,
    python=platform.python_version(),
    commit=found or "unknown",
    date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
  )
  modified = found is None or (not INSTALLED and modified_code())
  return origin | (dict(modified=True) if modified else {})


def commit(checkout: pathlib.Path = CHECKOUT) -> str | None:
  """Hash of the commit that is checked out; None if this is not a git checkout."""
  top = _git(checkout, "rev-parse", "--show-toplevel")
  if top is None or pathlib.Path(top) != checkout.resolve():
    return None  # installed inside the checkout of another project
  return _git(checkout, "rev-parse", "--short=12", "HEAD")


@functools.cache  # of the code that was imported, even if files change while a sweep runs
def code_hash(checkout: pathlib.Path = CHECKOUT) -> str:
  """A short hash of the library's source code: what a model computes and how it is trained.

  Hashes the files as they are, committed or not, without documentation and `experiments`.
  """
  hashed = hashlib.sha256()
  for package in ("deltanet_jax", "pallas_kernels"):
    for path in sorted((checkout / package).rglob("*.py")):
      hashed.update(f"{path.relative_to(checkout).as_posix()}\0".encode())
      hashed.update(path.read_bytes())
  return hashed.hexdigest()[:12]


def modified_code(checkout: pathlib.Path = CHECKOUT) -> list[str]:
  """Files that differ from the commit, and new modules; without results and documentation."""
  changed = _git(
    checkout, "status", "--porcelain", "-uno", "--", ".", ":!experiments/results", ":!*.md"
  )
  names = [line[2:].strip() for line in (changed or "").splitlines()]
  modules = [f"{package}/*.py" for package in _PACKAGES]
  new = _git(checkout, "ls-files", "--others", "--exclude-standard", "--", *modules)
  return names + (new or "").splitlines()


def command(checkout: pathlib.Path = CHECKOUT) -> str:
  """The command line, `python -m ...`; paths outside the checkout are cut to their last part."""

  def shorten(word):
    flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    path = pathlib.Path(value).expanduser()
    inside = pathlib.Path(os.path.abspath(path)).is_relative_to(checkout.resolve())
    is_path = "/" in value or "\\" in value
    return flag + equals + (value if inside or not is_path else f".../{path.name}")

  return " ".join(["python", "-m", app.module_name(), *map(shorten, sys.argv[1:])])


def _machine() -> str:
  cpu = platform.processor() or platform.machine()
  info = pathlib.Path("/proc/cpuinfo")
  if info.exists():
    names = [
      x.split(":", 1)[1] for x in info.read_text().splitlines() if x.startswith("model name")
    ]
    cpu = names[0].strip() if names else cpu
  return f"{cpu}, {os.cpu_count()} cores"


def _git(checkout: pathlib.Path, *words: str) -> str | None:
  """The output of a git command; None if it fails or git is not installed."""
  try:
    done = subprocess.run(["git", *words], cwd=checkout, capture_output=True, text=True)
  except FileNotFoundError:
    return None
  return done.stdout.strip("\n") if done.returncode == 0 else None
