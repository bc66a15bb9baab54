"""The installed package: lazy names, extras in error messages, and the wheel in an empty folder."""

import ast
import os
import pathlib
import pkgutil
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest

import deltanet_jax
from deltanet_jax import _extras, cli

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def python(code, *hidden):
  """Run code in which the hidden modules cannot be imported."""
  hide = f"import sys\nfor name in {hidden!r}: sys.modules[name] = None\n"
  done = subprocess.run([sys.executable, "-c", hide + code], capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  return done.stdout


def test_version_and_lazy_submodules():
  found = {m.name for m in pkgutil.iter_modules(deltanet_jax.__path__)}
  public = {name for name in found if not name.startswith("_")}
  assert set(deltanet_jax._SUBMODULES) == public - {"cli"}
  assert set(dir(deltanet_jax)) >= {*deltanet_jax._SUBMODULES, *deltanet_jax._NAMES, "__version__"}
  assert deltanet_jax.train.train and deltanet_jax.ops.delta_rule
  assert (ROOT / "deltanet_jax" / "py.typed").is_file()


def test_type_checkers_see_the_lazy_names():
  """The block under TYPE_CHECKING imports what __getattr__ imports."""
  tree = ast.parse((ROOT / "deltanet_jax" / "__init__.py").read_text())
  (block,) = [node for node in tree.body if isinstance(node, ast.If)]
  imported = {
    alias.name: node.module.removeprefix("deltanet_jax").lstrip(".")
    for node in block.body
    for alias in node.names
  }
  assert imported == deltanet_jax._NAMES | dict.fromkeys(deltanet_jax._SUBMODULES, "")


def test_hasattr_never_raises():
  code = """
import deltanet_jax
for name in (*dir(deltanet_jax), "nothing", "a.b", "__wrapped__", "", "cli"):
  print(name, hasattr(deltanet_jax, name))
"""
  found = python(code, "grain", "optax", "orbax", "flax", "safetensors", "tqdm")
  assert "\nops True\n" in found and "\ntrain False\n" in found and "\nnothing False\n" in found
  assert hasattr(deltanet_jax, "train") and not hasattr(deltanet_jax, "nothing")


@pytest.mark.parametrize(
  "statement",
  [
    "from deltanet_jax import load_trained",
    "from deltanet_jax import train",
    "import deltanet_jax.train",
    "from deltanet_jax.data import MQAR",
    "import deltanet_jax; deltanet_jax.train",
    "import experiments.train",
  ],
)
def test_a_missing_extra_is_named(statement):
  code = f"""
try:
  {statement}
except (ImportError, AttributeError) as e:
  print(e)
"""
  message = python(code, "grain")
  assert message.strip().endswith(
    "needs the extra `train` (no module named grain): pip install 'deltanet-jax[train]'"
  ), message


def test_extras_are_those_of_the_project():
  """Every module is in the extra that the message names."""
  extras = PROJECT["optional-dependencies"]
  name = lambda requirement: requirement.replace("-", "_").split(">")[0].split("[")[0].lower()
  of = {"absl": "absl_py", "orbax": "orbax_checkpoint"}
  for module, extra in _extras._EXTRA.items():
    assert of.get(module, module).lower() in map(name, extras[extra]), (module, extra)


@pytest.mark.slow
@pytest.mark.parametrize("package", _extras._NEEDS)
def test_required_modules_are_those_that_are_imported(package):
  needed = _extras._NEEDS[package]
  found = python(f"import sys, {package}; print(*sys.modules)").split()
  assert set(needed) <= set(found)
  indirect = ("absl", "optax", "orbax")  # dependencies of flax and grain
  python(f"import {package}", *{*_extras._EXTRA}.difference(needed, indirect))


def test_commands_are_listed_without_importing_them():
  text = cli.usage()
  for name in ("train", "evaluate", "generate", "export", "prepare_data", "sweep", "plots"):
    assert f"\n  {name} " in text, text
  assert "bench.kernel_speed" in text and "worker" not in text
  assert all(len(line.split(None, 1)) == 2 for line in text.splitlines() if line.startswith("  "))


class Environment:
  """A fresh virtual environment with the wheel installed, next to this one's dependencies."""

  def __init__(self, folder: pathlib.Path):
    # A copy: building leaves files in the source tree, and takes them into the next wheel.
    source = folder / "source"
    source.mkdir()
    for name in ("deltanet_jax", "pallas_kernels", "experiments"):
      ignore = shutil.ignore_patterns("__pycache__")
      shutil.copytree(ROOT / name, source / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
      shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index", "--quiet"]
    self._run(*pip, "wheel", "--no-build-isolation", *offline, "-w", folder / "dist", source)
    (self.wheel,) = (folder / "dist").glob("*.whl")
    self._run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    self.bin = folder / "venv" / "bin"
    self._run(*pip, "--python", self.bin / "python", "install", *offline, self.wheel)
    (self.site,) = (folder / "venv").glob("lib/python*/site-packages")
    # Dependencies without their .pth files, of which one is this project's editable install.
    sites = [path for path in sys.path if path.endswith("site-packages")]
    (self.site / "dependencies.pth").write_text("\n".join(sites) + "\n")
    self.empty = folder / "empty"
    self.empty.mkdir()

  def _run(self, *command, **options):
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout

  def run(self, *words, **environment):
    """Run a program of the environment in the empty folder."""
    settings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [self.bin / words[0], *words[1:]]
    return self._run(*command, cwd=self.empty, env=settings | environment)

  def installed(self) -> set[pathlib.Path]:
    found = self.site.rglob("*")
    return {path for path in found if "__pycache__" not in path.parts and path.is_file()}


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
  pytest.importorskip("setuptools", minversion="70.1", reason="needs setuptools of the extra dev")
  return Environment(tmp_path_factory.mktemp("package"))


def test_wheel(environment):
  """What is in it, and that it works without the checkout."""
  with zipfile.ZipFile(environment.wheel) as wheel:
    names = wheel.namelist()
    (metadata,) = [name for name in names if name.endswith("METADATA")]
    assert f"\nVersion: {deltanet_jax.__version__}\n" in wheel.read(metadata).decode()
  tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
  assert tops == {"deltanet_jax", "pallas_kernels", "experiments"}
  modules = {
    path.relative_to(ROOT).as_posix() for top in tops for path in ROOT.glob(f"{top}/**/*.py")
  }
  assert modules == {name for name in names if name.endswith(".py")}
  assert {"deltanet_jax/py.typed", "pallas_kernels/py.typed"} <= set(names)
  assert any(name.endswith("shipped/austen.jsonl.xz") for name in names)
  assert not any("results/" in name for name in names)
  code = "import deltanet_jax as d; print(d.__version__, d.__file__, d.data.shipped_corpus())"
  version, *files = environment.run("python", "-c", code).split()
  assert version == deltanet_jax.__version__
  assert all(pathlib.Path(file).is_relative_to(environment.site) for file in files)
  assert environment.run("deltanet", "--version") == f"deltanet-jax {version}\n"
  assert "\n  prepare_data " in environment.run("deltanet", "--help")


@pytest.mark.slow
def test_commands_of_the_wheel_in_an_empty_folder(environment):
  before, run = environment.installed(), lambda *words, **env: environment.run(*words, **env)
  # A user's own package of the same name, on the path of every Python.
  decoy = environment.empty / "experiments"
  decoy.mkdir()
  (decoy / "__init__.py").write_text("raise RuntimeError('the experiments of the user')\n")
  shadowed = dict(PYTHONPATH=".")
  help = run("deltanet", "train", "--help", **shadowed).replace("\n", " ")
  assert "deltanet train --config=" in help and "--config.optimizer.learning_rate" in help
  train = ["--config=tiny:deltanet", "--workdir=run", "--config.tokens=4096"]
  train += ["--config.data.workers=1"]  # a process of its own, which imports the command again
  run("deltanet", "train", *train, **shadowed)
  assert "perplexity" in run("deltanet", "evaluate", "--workdir=run", **shadowed)
  (environment.empty / "prompt.txt").write_text("It is")
  said = run("deltanet", "generate", "--workdir=run", "--text_file=prompt.txt", "--max_new=3")
  assert said.startswith("It is")
  run("deltanet", "export", "--workdir=run", "--output=weights")
  run("deltanet", "prepare-data", "--output=corpus")
  listed = run("deltanet", "sweep", "--config=mqar", "--list")
  assert "deltanet" in listed
  shutil.rmtree(decoy)
  assert "deltanet-tiny" in run("python", "-m", "experiments.models", "--match=tiny")
  run("deltanet", "bench.regbench_ngram", "--setting=mini", "--automata=20")
  made = {path.name for path in environment.empty.iterdir()}
  assert {"run", "weights", "corpus", "results"} <= made
  assert (environment.empty / "results" / "regbench_ngram" / "records.jsonl").is_file()
  assert environment.installed() == before
