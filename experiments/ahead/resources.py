"""What a kernel takes on its chip, from the files that the compilers wrote about it."""

import collections
import os
import re
import subprocess

from experiments.ahead.targets import ptxas
from experiments.ahead.worker import Compiled


def tpu_resources(compiled: Compiled, kernel: str) -> dict:
  """VLIW bundles of one grid step, its matrix instructions by the dtype of their operands, VMEM.

  Bundles are a lower bound on cycles. A loop inside the kernel would count once: `loops` says there
  is one. VMEM holds windows (twice, to load ahead), scratch and what registers spill.
  """

  def read(stage):
    pattern = rf"{kernel}.*\d-{stage}\.txt$"
    (path,) = [p for p in compiled.files if re.search(pattern, p.name)]
    return path.read_text()

  text = read("final_bundles")
  # "0x1f LB: >> { ... }": one angle bracket per loop around the bundle, the grid's the first.
  depths = [
    m[1].count(">") for m in re.finditer(r"^ *(?:0x)?[0-9a-f]+ +(?:\w\w)? *:([ >]*)\{", text, re.M)
  ]
  # "#allocation5 [shape = '...', space=vmem, size = 0x80000, scoped, tag = 'input window ...']"
  allocations = re.findall(
    r"^ *#allocation\w+ \[.*space=vmem, size = (0x[0-9a-f]+).*?tag = '(.*)'", read("post-ra"), re.M
  )
  return dict(
    bundles=sum(depth > 0 for depth in depths),
    loops=max(depths) > 1,
    vmem_bytes=sum(int(size, 16) for size, _ in allocations),
    spill_bytes=sum(int(size, 16) for size, tag in allocations if tag.startswith("spilled")),
    products=dict(collections.Counter(re.findall(r"= vmatmul[\w.]*?\.([a-z]+\d+)\b", text))),
  )


def gpu_resources(compiled: Compiled, kernel: str) -> dict:
  """Registers, spilled and shared bytes of a kernel, and its matrix instructions by kind."""
  texts = {p: p.read_text() for p in compiled.files if p.suffix == ".ptx" and p.stat().st_size}
  (path,) = [p for p, text in texts.items() if re.search(rf"\.entry {kernel}\b", text)]
  arch = compiled.machine.chip.nvidia.arch
  command = [ptxas(), "-v", f"-arch={arch}", str(path), "-o", os.devnull]
  said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
  number = lambda pattern, text: int(re.search(pattern, text)[1])
  shared = "".join(
    p.read_text()
    for p in compiled.files
    if p.name.endswith("thunk_sequence.txt") or p.suffix == ".compile_info"
  )
  kinds = re.findall(r"((?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)[\w.:]*)", texts[path])
  return dict(
    registers=number(r"Used (\d+) registers", said),
    spill_bytes=number(r"(\d+) bytes spill stores", said),
    shared_bytes=number(rf"\b{kernel}\b.*shared_mem(?:ory|_bytes): ?(\d+)", shared),
    products=dict(collections.Counter(kinds)),
  )
