"""Imports between packages point one way, and importing the operators stays light."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]

# A package may import only packages after it.
ORDER = (
  "experiments",
  "deltanet_jax.train",
  "deltanet_jax.eval",
  "deltanet_jax.generate",
  "deltanet_jax.interop",
  "deltanet_jax.models",
  "deltanet_jax.mixers",
  "deltanet_jax.ops",
  "pallas_kernels",
)
# These import nothing else of the project, except modules after them in this list.
LEAVES = (
  "deltanet_jax.data",
  "deltanet_jax.plugins",
  "deltanet_jax.config",
  "deltanet_jax.chips",
  "deltanet_jax.files",
  "deltanet_jax.object_storage",
  "deltanet_jax.host_memory",
  "deltanet_jax.device_batches",
  "deltanet_jax.sharding",
)
# Operators and kernels work on arrays: they import neither configuration nor data.
ARRAYS_ONLY = ("deltanet_jax.ops", "pallas_kernels")
# Third-party packages and the only packages that may import them.
ONLY = {
  "absl": ("experiments",),
  "ml_collections": ("experiments",),
  "matplotlib": ("experiments",),
  "flax": tuple(p for p in ORDER if p not in ARRAYS_ONLY),
  "optax": ("deltanet_jax.train", "experiments"),
  "orbax": ("deltanet_jax.train", "experiments"),
  "grain": ("deltanet_jax.data",),
}
# Not dependencies: only a worker that runs in its own environment imports them.
OTHERS = ("torch", "transformers")
OTHERS_WORKER = ROOT / "experiments/bench/compare_transformers_worker.py"
FILES = [
  p for d in ("experiments", "deltanet_jax", "pallas_kernels") for p in ROOT.glob(f"{d}/**/*.py")
]


def package_of(module: str) -> str | None:
  known = [p for p in (*ORDER, *LEAVES) if module == p or module.startswith(p + ".")]
  return known[0] if known else None


def imports(path: pathlib.Path) -> set[str]:
  names = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{path}: relative import"
      names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
  return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_import_direction(path):
  module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
  own = package_of(module)
  for name in imports(path):
    top = name.split(".")[0]
    assert top != "tests", f"{module} imports {name}"
    assert top not in OTHERS or path == OTHERS_WORKER, f"{module} imports {name}"
    if top in ONLY:
      assert own in ONLY[top], f"{module} imports {name}"
    target = package_of(name)
    if target is None or target == own:
      continue
    if own in LEAVES:
      allowed = LEAVES[LEAVES.index(own) + 1 :]
      assert target in allowed, f"{module} is a leaf and imports {name}"
    elif own in ARRAYS_ONLY:
      assert target == "pallas_kernels", f"{module} imports {name}"
    elif own is not None and target in ORDER:
      assert ORDER.index(own) < ORDER.index(target), f"{module} imports {name}"


def test_commands_do_not_import_one_another():
  commands = {p.stem for p in (ROOT / "experiments").glob("*.py")} - {"__init__"}
  for path in (ROOT / "experiments").glob("**/*.py"):
    for name in imports(path):
      assert name.removeprefix("experiments.") not in commands, f"{path} imports {name}"
      if path.relative_to(ROOT / "experiments").parts[0] in ("lib", "plots", "configs"):
        assert not name.startswith(("experiments.bench", "experiments.aot")), path


# Optional packages that neither the core dependencies nor Flax install.
EXTRAS = ("grain", "huggingface_hub", "matplotlib", "ml_collections", "tensorboardX", "tqdm")


@pytest.mark.parametrize(
  "code,missing",
  [
    ("delta_rule(x, x, x, x[..., 0])", (*EXTRAS, "absl", "flax", "optax", "orbax", "safetensors")),
    (
      "from deltanet_jax.generate import generate; build(preset('deltanet-tiny')); load_fla",
      EXTRAS,
    ),
  ],
)
def test_optional_dependencies_are_optional(code, missing):
  code = f"""
import sys
for name in {missing}: sys.modules[name] = None
import jax.numpy as jnp
from deltanet_jax import {"delta_rule" if "delta_rule" in code else "build, load_fla, preset"}
x = jnp.ones((1, 4, 1, 8))
{code}
"""
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
  assert done.returncode == 0, done.stderr


def test_importing_operators_is_light():
  code = "import sys, deltanet_jax.ops; print(sorted(sys.modules))"
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  heavies = ("torch", "triton", "jax_triton", "lm_eval", "matplotlib", "flax", "absl.flags")
  for heavy in (*heavies, "jax.experimental.pallas"):
    assert f"'{heavy}'" not in done.stdout, f"importing deltanet_jax imports {heavy}"
