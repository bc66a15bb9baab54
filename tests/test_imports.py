"""Arrows of import point one way, and a light import stays light."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]

# A package may import those after it. The leaves import none.
ORDER = (
  "experiments",
  "deltanet_jax.eval",
  "deltanet_jax.train",
  "deltanet_jax.generate",
  "deltanet_jax.interop",
  "deltanet_jax.models",
  "deltanet_jax.mixers",
  "deltanet_jax.ops",
  "pallas_kernels",
)
LEAVES = ("deltanet_jax.config", "deltanet_jax.data", "deltanet_jax.sharding")
# Third-party packages that only these may see.
ONLY = {
  "absl": ("experiments",),
  "ml_collections": ("experiments",),
  "flax": tuple(p for p in ORDER if p not in ("deltanet_jax.ops", "pallas_kernels")),
}
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
def test_direction(path):
  module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
  own = package_of(module)
  for name in imports(path):
    top = name.split(".")[0]
    assert top != "tests", f"{module} imports {name}"
    if top in ONLY:
      assert own in ONLY[top], f"{module} imports {name}"
    target = package_of(name)
    if target is None or target == own:
      continue
    if own in LEAVES:
      raise AssertionError(f"{module} is a leaf and imports {name}")
    if own is not None and target in ORDER:
      assert ORDER.index(own) < ORDER.index(target), f"{module} imports {name}"


def test_import_is_light():
  code = "import sys, deltanet_jax.ops; print(sorted(sys.modules))"
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  for heavy in ("torch", "triton", "jax_triton", "lm_eval", "matplotlib", "flax", "absl.flags"):
    assert f"'{heavy}'" not in done.stdout, f"importing deltanet_jax imports {heavy}"
