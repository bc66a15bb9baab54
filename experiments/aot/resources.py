"""Static resource usage of a kernel, parsed from the files that the compilers dump.

TPU: VLIW bundles, VMEM, spills. GPU: registers, spills, shared memory, occupancy (blocks per SM).
"""

import collections
import itertools
import pathlib
import re
import subprocess
import tempfile

from deltanet_jax.chips import Nvidia
from experiments.aot.targets import nvdisasm, ptxas
from experiments.aot.worker import Compiled

# Per streaming multiprocessor (SM) of A100, H100 and B200.
_REGISTERS, _THREADS, _BLOCKS = 65536, 2048, 32
_RESERVED_SHARED_BYTES = 1024  # per block, in addition to its own shared memory
_TENSOR_MEMORY_COLUMNS = 512  # B200: tensor memory holds matmul accumulators


def tpu_resources(compiled: Compiled, kernel: str) -> dict:
  """VLIW bundles per grid step, matmul instructions by operand dtype, VMEM and spills.

  Bundles are a lower bound on cycles. The body of a loop inside the kernel counts once;
  `bundles_per_loop_iteration` lists the size of each body. VMEM holds double-buffered windows,
  scratch and spilled registers.
  """

  def read(stage):
    pattern = rf"{kernel}.*\d-{stage}\.txt$"
    (path,) = [p for p in compiled.files if re.search(pattern, p.name)]
    return path.read_text()

  text = read("final_bundles")
  # "0x1f LB: >> { ... }": one angle bracket per enclosing loop, the first is the grid.
  depths = [
    m[1].count(">") for m in re.finditer(r"^ *(?:0x)?[0-9a-f]+ +(?:\w\w)? *:([ >]*)\{", text, re.M)
  ]
  loops = [len(list(run)) for deep, run in itertools.groupby(depths, lambda x: x > 1) if deep]
  # "#allocation5 [shape = '...', space=vmem, size = 0x80000, scoped, tag = 'input window ...']"
  allocations = re.findall(
    r"^ *#allocation\w+ \[.*space=vmem, size = (0x[0-9a-f]+).*?tag = '(.*)'", read("post-ra"), re.M
  )
  matmuls = collections.Counter(re.findall(r"= vmatmul[\w.]*?\.([a-z]+\d+)\b", text))
  return dict(
    bundles_per_grid_step=sum(depth > 0 for depth in depths),
    bundles_per_loop_iteration=[n for n in loops if n > 8],  # shorter runs are branches
    vmem_bytes=sum(int(size, 16) for size, _ in allocations),
    spill_bytes=sum(int(size, 16) for size, tag in allocations if tag.startswith("spilled")),
    matmul_instructions=dict(matmuls),
  )


def gpu_resources(compiled: Compiled, kernel: str) -> dict:
  """Resources of a thread block, occupancy, and static instruction counts.

  Instructions inside a loop count once. Barriers and asynchronous copies are counted in SASS,
  matmul instructions in PTX, where their names include the shape.
  """
  texts = {p: p.read_text() for p in compiled.files if p.suffix == ".ptx" and p.stat().st_size}
  (path,) = [p for p, text in texts.items() if re.search(rf"\.entry {kernel}\b", text)]
  gpu = compiled.machine.chip.nvidia
  ptxas_log, sass = _assemble(path, gpu.arch)
  number = lambda pattern, text: int(re.search(pattern, text)[1])
  launch_info = "".join(
    p.read_text()
    for p in compiled.files
    if p.name.endswith("thunk_sequence.txt") or p.suffix == ".compile_info"
  )
  matmuls = re.findall(r"((?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)[\w.:]*)", texts[path])
  columns = re.search(r"tcgen05\.alloc[^;]*, (\d+);", texts[path])
  block = dict(
    tensor_memory_columns=int(columns[1]) if columns else 0,
    threads=number(r"\.(?:reqntid|maxntid) (\d+)", texts[path]),
    registers=number(r"Used (\d+) registers", ptxas_log),
    shared_bytes=number(rf"\b{kernel}\b.*shared_mem(?:ory|_bytes): ?(\d+)", launch_info),
  )
  return dict(
    **block,
    spill_bytes=number(r"(\d+) bytes spill stores", ptxas_log),
    blocks_per_sm=blocks_per_sm(gpu, **block),
    barriers=len(re.findall(r"\bBAR\.SYNC", sass)),
    async_copies=len(re.findall(r"\bLDGSTS", sass)),
    matmul_instructions=dict(collections.Counter(matmuls)),
  )


def _assemble(path, arch):
  """(log of `ptxas -v`, SASS) of a PTX file."""
  with tempfile.TemporaryDirectory() as folder:
    out = pathlib.Path(folder, "cubin")
    command = [ptxas(), "-v", f"-arch={arch}", path, "-o", out]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    sass = subprocess.run([nvdisasm(), out], capture_output=True, text=True, check=True).stdout
  return log, sass


def blocks_per_sm(
  gpu: Nvidia, *, threads: int, registers: int, shared_bytes: int, tensor_memory_columns: int = 0
) -> int:
  """Occupancy: the number of blocks of a kernel that are resident on one SM."""
  registers = -(-registers // 8) * 8  # allocated in units of 8
  return min(
    _REGISTERS // (registers * threads),
    gpu.shared_bytes_per_core // (shared_bytes + _RESERVED_SHARED_BYTES),
    _THREADS // threads,
    _TENSOR_MEMORY_COLUMNS // tensor_memory_columns if tensor_memory_columns else _BLOCKS,
    _BLOCKS,
  )
