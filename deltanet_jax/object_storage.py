"""Paths on object storage, `s3://bucket/key` and `gs://bucket/key`, through TensorStore.

TensorStore also stores the arrays of checkpoints, so files and arrays share credentials, endpoint
and retries, and no other client library is needed. S3: `AWS_ACCESS_KEY_ID`,
`AWS_SECRET_ACCESS_KEY`, `AWS_REGION`, `AWS_PROFILE` or the role of the machine, and
`AWS_ENDPOINT_URL` for another server. GCS: application default credentials, and
`TENSORSTORE_GCS_HTTP_URL` for another server.
"""

import contextlib
import functools
import io
import os
import pathlib
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator

from deltanet_jax._extras import require

SCHEMES = ("gs", "s3")
_RENEW = 10.0  # seconds between renewals of a lease
_EXPIRE = 45.0  # seconds without a renewal after which a lease belongs to a killed process
_RETRIES = dict(max_retries=6, initial_delay="200ms", max_delay="5s")


class ObjectPath(pathlib.PosixPath):
  """A path on object storage with the methods of pathlib that this library uses.

  There are no folders: a folder exists while an object's name starts with its path. Every write is
  atomic. Methods that are not defined here would need a local file and raise OSError.
  """

  __slots__ = ()

  def __str__(self):
    return f"{self.parts[0]}//{'/'.join(self.parts[1:])}"

  def __fspath__(self):
    raise OSError(f"{self} is on object storage, but a local file is needed: copy it first.")

  @property
  def _key(self) -> str:
    return "/".join(self.parts[2:])

  @property
  def _prefix(self) -> str:
    return f"{self._key}/" if self._key else ""

  def kvstore(self) -> dict:
    """Return TensorStore's JSON specification of this folder."""
    return _specification(self.parts[0].removesuffix(":"), self.parts[1]) | dict(path=self._prefix)

  def _call(self, verb: str, call: Callable):
    try:
      return call(_store(self.parts[0].removesuffix(":"), self.parts[1]))
    except ValueError as e:
      reason = (str(e).strip() or repr(e)).splitlines()[0].split(" [")[0][:200]
      raise OSError(
        f"{self} cannot be {verb} ({reason}): check the bucket, the credentials and the endpoint."
      ) from e

  def _list(self, first: str, last: str) -> list[str]:
    """Return the names of all objects from `first` to before `last`."""
    keys = lambda store: store.list(store.KeyRange(first, last)).result()
    found = sorted(key.decode() for key in self._call("listed", keys))
    # gcp-storage-emulator ignores the end of the range.
    return [key for key in found if first <= key and (not last or key < last)]

  def _below(self) -> list[str]:
    prefix = self._prefix
    # "0" follows "/" in ASCII: the range of all names that start with the prefix.
    return self._list(prefix, f"{self._key}0" if self._key else "")

  def _other(self, key: str) -> "ObjectPath":
    return type(self)(*self.parts[:2], key)

  def resolve(self, strict=False):
    return self

  def absolute(self):
    return self

  def exists(self):
    return self.is_file() or self.is_dir()

  def is_file(self):
    return bool(self._key and self._list(self._key, f"{self._key}\0"))

  def is_dir(self):
    return bool(self._below())

  def iterdir(self):
    start = len(self._prefix)
    names = dict.fromkeys(key[start:].split("/")[0] for key in self._below())
    return iter([self / name for name in names if name])

  def objects(self) -> list["ObjectPath"]:
    """Return all objects below this folder."""
    return [self._other(key) for key in self._below() if not key.endswith("/")]

  def read_bytes(self):
    found, _ = self.read_versioned()
    if found is None:
      raise FileNotFoundError(2, "No such object", str(self))
    return found

  def read_text(self, encoding=None, errors=None):
    return self.read_bytes().decode()

  def open(self, mode="r", buffering=-1, encoding=None, errors=None, newline=None):
    if mode not in ("r", "rb"):
      raise OSError(f"{self} is on object storage and cannot be opened with mode {mode!r}.")
    return io.BytesIO(self.read_bytes()) if mode == "rb" else io.StringIO(self.read_text())

  def write_bytes(self, data):
    self._call("written", lambda store: store.write(self._key, bytes(data)).result())
    return len(data)

  def write_text(self, data, encoding=None, errors=None, newline=None):
    return self.write_bytes(data.encode())

  def read_versioned(self) -> tuple[bytes | None, bytes]:
    """Return content and version of an object; the content is None if there is no such object."""
    found = self._call("read", lambda store: store.read(self._key).result())
    return (found.value if found.state == "value" else None), found.stamp.generation

  def replace_version(self, data: bytes | None, version: bytes) -> bytes | None:
    """Write an object, or delete it, unless another process has changed it since `version`.

    Returns:
      The new version; None if it was changed, and nothing was written.
    """
    write = lambda store: store.write(self._key, data, if_equal=version).result()
    return self._call("written", write).generation or None

  def unlink(self, missing_ok=False):
    self._call("deleted", lambda store: store.write(self._key, None).result())

  def remove_tree(self):
    """Delete all objects below this folder."""
    keys = self._below()

    def remove(store):
      for removed in [store.write(key, None) for key in keys]:
        removed.result()

    self._call("deleted", remove)

  def mkdir(self, mode=0o777, parents=False, exist_ok=False):
    """Do nothing: folders exist by their objects."""

  def rmdir(self):
    """Do nothing: folders exist by their objects."""

  def rename(self, target):
    """Copy an object, or all objects of a folder, and delete the originals: not atomic."""
    for path in [self] if self.is_file() else self.objects():
      name = path._key[len(self._key) :].lstrip("/")
      (target / name if name else target).write_bytes(path.read_bytes())
    self.unlink()
    self.remove_tree()
    return target


def download(folder: ObjectPath, target: pathlib.Path) -> pathlib.Path:
  """Copy all objects of a folder to a local folder, which is created, and return that."""
  for path in folder.objects():
    local = target / path._key[len(folder._prefix) :]
    local.parent.mkdir(parents=True, exist_ok=True)
    local.write_bytes(path.read_bytes())
  return target


def upload(source: pathlib.Path, folder: ObjectPath, *, last: str):
  """Copy all files of a local folder, the file `last` at the end: its object is the commit marker.

  An interrupted upload leaves a folder without it, which readers take for incomplete.
  """
  found = sorted(path for path in source.rglob("*") if path.is_file())
  for path in sorted(found, key=lambda path: path == source / last):
    (folder / path.relative_to(source).as_posix()).write_bytes(path.read_bytes())


@contextlib.contextmanager
def leased(path: ObjectPath, *, wait: bool, in_use: Callable, report: Callable) -> Iterator[None]:
  """Hold an exclusive lease: an object that is written only if there is none, and renewed.

  A process that is killed leaves its object behind. It is taken over if that process ran on this
  machine and has ended, or if it is not renewed for 45 seconds while this function watches, so
  clocks of different machines are not compared.

  Args:
    path: object of the lease.
    wait: wait for a lease in use.
    in_use: returns the exception to raise for a lease in use, given its holder.
    report: called with one line of text before waiting for a lease that may have expired.
  """
  owner = f"process {os.getpid()} on {socket.gethostname()}"
  # Unique content, because the version of an object on S3 is a hash of it.
  content = lambda: f"{owner}\n{uuid.uuid4()}\n".encode()
  version, seen, told = None, None, False
  while version is None:
    found, current = path.read_versioned()
    holder = None if found is None else found.decode().splitlines()[0]
    if holder is None or _ended(holder) or (seen and time.monotonic() - seen[1] > _EXPIRE):
      version = path.replace_version(content(), current)
      seen = None
      continue
    if seen and seen[0] != current and not wait:  # renewed: that process runs
      raise in_use(holder)
    if seen is None or seen[0] != current:
      seen = current, time.monotonic()
    if not wait and not told:
      report(f"{path} is held by {holder}: waiting up to {_EXPIRE:.0f} s for a sign of life.")
      told = True
    time.sleep(0.2 if wait else 1.0)
  ended = threading.Event()
  held = [version]

  def renew():
    while not ended.wait(_RENEW):
      # A failed request is repeated at the next renewal.
      with contextlib.suppress(OSError):
        held[0] = path.replace_version(content(), held[0])
        if held[0] is None:
          report(f"{path} was taken over by another process: stop one of the two.")
          return

  thread = threading.Thread(target=renew, daemon=True)
  thread.start()
  try:
    yield
  finally:
    ended.set()
    thread.join()
    if held[0] is not None:
      with contextlib.suppress(OSError):  # it expires
        path.replace_version(None, held[0])


def _ended(holder: str) -> bool:
  """Whether the holder of a lease is a process of this machine that has ended."""
  number, _, host = holder.removeprefix("process ").partition(" on ")
  if host != socket.gethostname() or not number.isdigit():
    return False
  if int(number) == os.getpid():
    return False
  try:
    os.kill(int(number), 0)
  except ProcessLookupError:
    return True
  except PermissionError:
    return False
  return False


def _specification(scheme: str, bucket: str) -> dict:
  if scheme == "gs":
    return dict(driver="gcs", bucket=bucket, gcs_request_retries=_RETRIES)
  spec = dict(driver="s3", bucket=bucket, s3_request_retries=_RETRIES)
  endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
  region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
  if endpoint:
    spec |= dict(endpoint=endpoint.rstrip("/"), aws_region=region or "us-east-1")
  elif region:
    spec |= dict(aws_region=region)
  if "AWS_ACCESS_KEY_ID" in os.environ:
    spec |= dict(aws_credentials=dict(type="environment"))
  return spec


@functools.lru_cache(maxsize=8)
def _store(scheme: str, bucket: str):
  require(f"Reading and writing {scheme}://", "tensorstore")
  import tensorstore

  return tensorstore.KvStore.open(_specification(scheme, bucket)).result()
