"""What a kernel takes on its chip, from the files that the compilers wrote about it."""

import collections
import itertools
import pathlib
import re
import subprocess
import tempfile

from deltanet_jax.chips import Nvidia
from experiments.aot.targets import nvdisasm, ptxas
from experiments.aot.worker import Compiled

# Of every core (streaming multiprocessor) of A100, H100 and B200.
_REGISTERS, _THREADS, _BLOCKS = 65536, 2048, 32
_RESERVED = 1024  # bytes of shared memory that a block takes beside its own
_TENSOR_COLUMNS = 512  # of a B200's tensor memory, which holds what its products add up


def tpu_resources(compiled: Compiled, kernel: str) -> dict:
  """VLIW bundles of one grid step, its matrix instructions by the dtype of their operands, VMEM.

  Bundles are a lower bound on cycles. Loops inside the kernel count once; `loop_bundles` are those
  of one round of each. VMEM holds windows (twice, to load ahead), scratch and what registers spill.
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
  loops = [len(list(run)) for deep, run in itertools.groupby(depths, lambda x: x > 1) if deep]
  # "#allocation5 [shape = '...', space=vmem, size = 0x80000, scoped, tag = 'input window ...']"
  allocations = re.findall(
    r"^ *#allocation\w+ \[.*space=vmem, size = (0x[0-9a-f]+).*?tag = '(.*)'", read("post-ra"), re.M
  )
  return dict(
    bundles=sum(depth > 0 for depth in depths),
    loop_bundles=[n for n in loops if n > 8],  # not those of a branch
    vmem_bytes=sum(int(size, 16) for size, _ in allocations),
    spill_bytes=sum(int(size, 16) for size, tag in allocations if tag.startswith("spilled")),
    products=dict(collections.Counter(re.findall(r"= vmatmul[\w.]*?\.([a-z]+\d+)\b", text))),
  )


def gpu_resources(compiled: Compiled, kernel: str) -> dict:
  """What a block of a kernel takes, how many fit on a core, and its instructions of some kinds.

  Instructions are counted in the code, once inside a loop: barriers and asynchronous copies in
  that of the chip, products by kind in PTX, which names their shape.
  """
  texts = {p: p.read_text() for p in compiled.files if p.suffix == ".ptx" and p.stat().st_size}
  (path,) = [p for p, text in texts.items() if re.search(rf"\.entry {kernel}\b", text)]
  gpu = compiled.machine.chip.nvidia
  said, code = _assemble(path, gpu.arch)
  number = lambda pattern, text: int(re.search(pattern, text)[1])
  shared = "".join(
    p.read_text()
    for p in compiled.files
    if p.name.endswith("thunk_sequence.txt") or p.suffix == ".compile_info"
  )
  kinds = re.findall(r"((?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)[\w.:]*)", texts[path])
  columns = re.search(r"tcgen05\.alloc[^;]*, (\d+);", texts[path])
  block = dict(
    tensor_columns=int(columns[1]) if columns else 0,
    threads=number(r"\.(?:reqntid|maxntid) (\d+)", texts[path]),
    registers=number(r"Used (\d+) registers", said),
    shared_bytes=number(rf"\b{kernel}\b.*shared_mem(?:ory|_bytes): ?(\d+)", shared),
  )
  return dict(
    **block,
    spill_bytes=number(r"(\d+) bytes spill stores", said),
    blocks_per_core=blocks_per_core(gpu, **block),
    barriers=len(re.findall(r"\bBAR\.SYNC", code)),
    async_copies=len(re.findall(r"\bLDGSTS", code)),
    products=dict(collections.Counter(kinds)),
  )


def _assemble(path, arch):
  """What ptxas says about a PTX file, and the chip's instructions."""
  with tempfile.TemporaryDirectory() as folder:
    out = pathlib.Path(folder, "cubin")
    command = [ptxas(), "-v", f"-arch={arch}", path, "-o", out]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    code = subprocess.run([nvdisasm(), out], capture_output=True, text=True, check=True).stdout
  return said, code


def blocks_per_core(
  gpu: Nvidia, *, threads: int, registers: int, shared_bytes: int, tensor_columns: int = 0
) -> int:
  """How many blocks of a kernel a core holds at once."""
  registers = -(-registers // 8) * 8  # given out in eights
  return min(
    _REGISTERS // (registers * threads),
    gpu.shared_bytes_per_core // (shared_bytes + _RESERVED),
    _THREADS // threads,
    _TENSOR_COLUMNS // tensor_columns if tensor_columns else _BLOCKS,
    _BLOCKS,
  )
