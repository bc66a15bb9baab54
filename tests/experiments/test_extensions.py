"""Mixers, tasks and evaluators of the user's modules: registered, stored by import path, read."""

import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import textwrap

import jax
import pytest

from deltanet_jax import build, load_trained, plugins, save_weights
from deltanet_jax.config import ModelConfig
from deltanet_jax.data import StateTracking
from deltanet_jax.mixers import MIXERS, mixer_class, register_installed
from deltanet_jax.mixers.gla import GLA
from experiments.lib import config_file, extensions, import_flag
from tests.support.training import ROOT, silent, tiny

SECTION = (ROOT / "experiments/README.md").read_text().partition("## Your own mixer")[2]
MIXER, CONFIG = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)[:2]


@pytest.fixture(scope="module", autouse=True)
def as_users_run():
  """Default dtypes, because optax fails strict promotion."""
  with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
    yield


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """The working directory of a user with the two files of the README; forgets what was imported."""
  modules, path = set(sys.modules), list(sys.path)
  (tmp_path / "my_mixers.py").write_text(MIXER)
  (tmp_path / "my_config.py").write_text(CONFIG)
  monkeypatch.chdir(tmp_path)
  yield tmp_path
  forget(modules)
  sys.path[:] = path


def forget(modules=()):
  """Leave the process as one that has imported no module of the user's."""
  MIXERS.pop("leaky", None)
  for name in [x for x in sys.modules if x.startswith("my_") and x not in modules]:
    del sys.modules[name]


def model(kind="leaky", **sizes):
  config = mixer_class(kind).Config(heads=2)
  sizes = dict(vocab=16, width=16, depth=1, mlp_multiple=16) | sizes
  return build(ModelConfig(mixers={"a": config}, pattern=("a",), **sizes))


def exported(folder):
  """Weights of a model with the user's mixer, and a process that has not imported it."""
  plugins.import_module("my_mixers")
  save_weights(model(), folder / "weights")
  forget()
  return folder / "weights"


def start(command, folder):
  python = command.replace("python", shlex.quote(sys.executable), 1)
  environment = os.environ | dict(PYTHONPATH=str(ROOT))
  return subprocess.Popen(
    shlex.split(python), cwd=folder, env=environment, text=True,
    stdout=subprocess.PIPE, stderr=subprocess.PIPE,
  )  # fmt: skip


def finish(process):
  output, errors = process.communicate()
  assert process.returncode == 0, errors
  return output


def test_the_example_of_the_readme(folder):
  block = re.search(r"```bash\n(.*?)```", SECTION, re.DOTALL)[1]
  train, *readers = block.strip().splitlines()
  assert len((MIXER + CONFIG + block).splitlines()) <= 45
  assert "validation_loss" in finish(start(train, folder))
  evaluated, generated, wrote = map(finish, [start(line, folder) for line in readers])
  assert "perplexity" in evaluated and generated.startswith("It is a truth ")
  assert "after step 20" in wrote
  stored = json.loads((folder / "leaky_weights/config.json").read_text())
  assert stored["mixers"] == {"leaky": "my_mixers:Leaky"}
  assert "leaky" not in MIXERS and load_trained("leaky_weights").step == 20


def test_weights_are_read_by_the_stored_import_path(folder):
  read = load_trained(exported(folder))
  assert type(read.model.cfg.mixers["a"]).__name__ == "LeakyConfig"
  save_weights(read, folder / "again")
  stored = json.loads((folder / "again/config.json").read_text())["mixers"]
  assert stored == {"leaky": "my_mixers:Leaky"}


def test_a_module_that_has_moved(folder):
  weights = exported(folder)
  (folder / "my_mixers.py").rename(folder / "my_new_name.py")
  message = "'leaky' of my_mixers:Leaky cannot be imported .*no module 'my_mixers'.*--import=MODULE"
  with pytest.raises(ValueError, match=message):
    load_trained(weights)
  import_flag.import_modules_of(["evaluate", "--import", "my_new_name", "--batch=4"])
  assert load_trained(weights).step == 0


def test_a_mixer_defined_in_a_file(folder):
  """As in a config file: executed, but no module that can be imported by name."""
  plugins.import_module(f"{folder}/my_mixers.py")
  save_weights(model(), folder / "weights")
  forget()
  with pytest.raises(ValueError, match=rf"commands with --import={folder}/my_mixers.py\.$"):
    load_trained(folder / "weights")
  import_flag.import_modules_of(["evaluate", f"--import={folder}/my_mixers.py"])
  assert load_trained(folder / "weights").step == 0


def test_files_without_import_paths(folder):
  """Files of version 0.1, and mixers of a script."""
  weights = exported(folder)
  stored = json.loads((weights / "config.json").read_text())
  del stored["mixers"]
  (weights / "config.json").write_text(json.dumps(stored))
  message = r"mixer kind is 'leaky', expected one of \['abc', .*, in commands with --import=MODULE"
  with pytest.raises(ValueError, match=message):
    load_trained(weights)
  stored["mixers"] = {"leaky": "__main__:Leaky"}
  (weights / "config.json").write_text(json.dumps(stored))
  with pytest.raises(ValueError, match="defined in the script that trained it: move it"):
    load_trained(weights)


def test_the_own_mixers_keep_their_names_and_cannot_be_replaced(tmp_path, monkeypatch):
  save_weights(model("gla"), tmp_path / "weights")
  assert json.loads((tmp_path / "weights/config.json").read_text())["mixers"] == {}
  monkeypatch.setitem(MIXERS, "gla", type("Another", (GLA,), {}))
  with pytest.raises(ValueError, match="Another replaces the package's own mixer 'gla'"):
    save_weights(model("gla"), tmp_path / "other")
  cfg = tiny(tokens=256)
  cfg.model = model("gla", vocab=260).cfg
  task = StateTracking("parity", length=32, batch=8)
  with pytest.raises(ValueError, match="register it under another kind"):
    silent(cfg, tmp_path / "run", task)
  assert not (tmp_path / "run").exists()


@pytest.fixture
def installed(folder, monkeypatch):
  """An installed package with entry points."""
  points = """
    [deltanet_jax.mixers]
    leaky = my_mixers:Leaky
    [deltanet_jax.tasks]
    my_parity = my_tasks:parity
    broken = my_nothing:task
    """
  info = folder / "site/my_package-1.0.dist-info"
  info.mkdir(parents=True)
  (info / "METADATA").write_text("Name: my-package\nVersion: 1.0\n")
  (info / "entry_points.txt").write_text(textwrap.dedent(points))
  (folder / "site/my_mixers.py").write_text(MIXER.replace('MIXERS["leaky"] = Leaky', ""))
  (folder / "site/my_tasks.py").write_text(TASKS)
  (folder / "my_mixers.py").unlink()
  monkeypatch.syspath_prepend(str(folder / "site"))
  return folder


TASKS = """
from deltanet_jax.data import StateTracking


def parity(cfg):
  return StateTracking("parity", length=cfg.data.length, batch=cfg.data.batch, validation_batches=1)


def weight_norm(context):
  yield "weight_norm", float(sum((w * w).sum() for w in context.weights.values()))


def words(cfg):
  return ["no task"]
"""


def test_entry_points(installed):
  save_weights(model(), installed / "weights")
  forget()
  assert load_trained(installed / "weights").step == 0
  forget()
  register_installed()
  assert MIXERS["leaky"].__module__ == "my_mixers"
  assert extensions.open_task("my_parity", tiny()).shape == (8, 32)
  with pytest.raises(
    ValueError, match=r"entry point 'broken' of deltanet_jax\.tasks, my_nothing:task"
  ):
    extensions.open_task("broken", tiny())
  message = r"no task 'my_party' \(nearest: my_parity\); expected module:name, or an entry point: b"
  with pytest.raises(ValueError, match=message):
    extensions.open_task("my_party", tiny())


@pytest.mark.parametrize(
  "call, message",
  [
    (lambda: extensions.open_task("my_tasks:nothing", tiny()), "my_tasks has no 'nothing'"),
    (lambda: extensions.open_task("my_tasks:words", tiny()), "returned list, expected .*Task"),
    (lambda: extensions.open_evaluators(["my_tasks:__name__"]), "is str, expected a function"),
    (lambda: extensions.open_evaluators(["norm"]), "no evaluator 'norm'; expected module:name"),
    (lambda: plugins.import_module("my-mixers"), "not the name of a module: expected"),
    (lambda: plugins.import_module("my_broken"), "my_broken.py, line 2.: ZeroDivisionError"),
    (lambda: plugins.import_module("my_importing"), "No module named 'my_nothing'"),
    (lambda: plugins.import_module("none/my.py"), "there is no Python file 'none/my.py'"),
  ],
)
def test_wrong_names(call, message, folder):
  (folder / "my_tasks.py").write_text(TASKS)
  (folder / "my_broken.py").write_text("x = 1\nx / 0\n")
  (folder / "my_importing.py").write_text("import my_nothing\n")
  with pytest.raises(ValueError, match=message):
    call()


def test_a_config_that_needs_an_imported_mixer(folder):
  (folder / "my_config.py").write_text(CONFIG.replace("import my_mixers\n", "").replace(
    "my_mixers.LeakyConfig", "MIXERS['leaky'].Config"
  ).replace("from exp", "from deltanet_jax.mixers import MIXERS\nfrom exp"))  # fmt: skip
  with pytest.raises(SystemExit, match=r"--import: there is no module 'my_mixer' on sys.path"):
    config_file.parse(["train", "--config=my_config.py", "--import=my_mixer"])
  import_flag.import_modules_of(["train", "--import=my_mixers"])
  assert config_file.load("my_config.py").model.pattern == ("leaky",)


@pytest.mark.slow
def test_a_task_and_an_evaluator_by_flags(folder):
  (folder / "my_tasks.py").write_text(TASKS)
  flags = "--task=my_tasks:parity --evaluator=my_tasks:weight_norm"
  train = f"python -m experiments.train --config=tiny --workdir=run --config.tokens=20480 {flags}"
  trained = finish(start(train, folder)).strip().splitlines()[-1]
  assert "validation_accuracy" in trained and "weight_norm" in trained
  (evaluated, wrote) = finish(
    start("python -m experiments.evaluate --workdir=run", folder)
  ).splitlines()
  assert evaluated == trained
  (record,) = pathlib.Path(folder, wrote.removeprefix("wrote ")).read_text().splitlines()
  assert json.loads(record)["key"]["text"] == "my_tasks:parity"
