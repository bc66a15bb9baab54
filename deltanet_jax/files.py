"""Atomic file writes, locks and checksums, on the local disk and on object storage.

On the local disk a write is atomic by a rename and a lock is a lock of the operating system. On
object storage every write is atomic, a lock is a lease, and a folder of several files is complete
when its last file is there; see `object_storage`.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import pathlib
import re
import shutil
import socket
import tempfile
from collections.abc import Callable

from deltanet_jax import object_storage
from deltanet_jax.object_storage import SCHEMES, ObjectPath

_LEASE = "lease"  # name of the object; not `lock`, which a copy of a local run contains
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)

# `s3://bucket/run`, or `s3:/bucket/run`: pathlib drops the second slash.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def as_path(path: str | os.PathLike) -> pathlib.Path:
  """Return the path that a user named: of the local disk, or an ObjectPath for s3:// and gs://.

  Raises:
    ValueError: it is a URL with another scheme, or without a bucket.
  """
  if isinstance(path, ObjectPath):
    return path
  scheme = _URL.match(os.fspath(path))
  if scheme is None:
    return pathlib.Path(path)
  if scheme[1] not in SCHEMES:
    raise ValueError(
      f"{path} is a URL, and {scheme[1]}:// is not supported: name a local path, or a folder on"
      " s3:// or gs://."
    )
  found = ObjectPath(path)
  if len(found.parts) < 3:
    raise ValueError(f"{path} names no folder, expected {scheme[1]}://bucket/folder.")
  return found


def as_local_path(path: str | os.PathLike, use: str) -> pathlib.Path:
  """Return the path that a user named, which must be of the local disk.

  Args:
    use: what the path is for, in messages.
  """
  found = as_path(path)
  if isinstance(found, ObjectPath):
    raise ValueError(f"{path} is on object storage, but {use} must be local: name a local path.")
  return found


def cache_folder() -> pathlib.Path:
  """Return the folder for local copies: $XDG_CACHE_HOME/deltanet-jax, or ~/.cache/deltanet-jax."""
  base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  return pathlib.Path(base) / "deltanet-jax"


@contextlib.contextmanager
def local_copy(folder: pathlib.Path):
  """Yield a folder itself, or a temporary local copy of a folder on object storage."""
  if not isinstance(folder, ObjectPath):
    yield folder
    return
  with tempfile.TemporaryDirectory() as temporary:
    yield object_storage.download(folder, pathlib.Path(temporary) / folder.name)


def all_files(folder: pathlib.Path) -> list[pathlib.Path]:
  """Return all files below a folder."""
  if isinstance(folder, ObjectPath):
    return folder.objects()
  return [path for path in folder.rglob("*") if path.is_file()]


def remove_tree(folder: pathlib.Path):
  """Delete a folder with all its files, if it exists."""
  if isinstance(folder, ObjectPath):
    folder.remove_tree()
  else:
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def writing(folder: str | pathlib.Path):
  """Turn errors of a full or read-only disk while writing `folder` into a one-line message."""
  try:
    yield
  except OSError as e:
    if e.errno not in _DISK:
      raise
    raise OSError(f"{folder} cannot be written ({e.strerror}): choose a writable folder.") from e


def check_writable(folder: str | pathlib.Path):
  """Create a folder, and raise OSError if no file can be written to it.

  Call it before hours of computation whose results go there. Folders that it created are removed
  again.
  """
  folder = as_path(folder)
  if isinstance(folder, ObjectPath):
    probe = folder / f".write_test_{socket.gethostname()}_{os.getpid()}"
    probe.write_text("probe\n")
    probe.unlink()
    return
  created = [path for path in (folder, *folder.parents) if not path.exists()]
  with writing(folder):
    try:
      folder.mkdir(parents=True, exist_ok=True)
      with tempfile.TemporaryFile(dir=folder):
        pass
    finally:
      for path in created:
        with contextlib.suppress(OSError):  # it does not exist, or another process has used it
          path.rmdir()


@contextlib.contextmanager
def replacing(path: pathlib.Path):
  """Yield a temporary path to write; on success it replaces `path` atomically."""
  if isinstance(path, ObjectPath):
    with tempfile.TemporaryDirectory() as temporary:
      new = pathlib.Path(temporary) / path.name
      yield new
      path.write_bytes(new.read_bytes())
    return
  new = path.with_name(path.name + ".new")
  try:
    yield new
    sync(new)
    new.replace(path)
    sync_folder(path.parent)
  finally:
    new.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(folder: pathlib.Path, *, last: str):
  """Yield a temporary folder to fill; on success it is renamed to `folder` atomically.

  Args:
    last: file that readers need first; on object storage it is uploaded last, so that a folder
      without it is incomplete.
  """
  if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
    raise ValueError(f"{folder} is not empty: name a new folder.")
  if isinstance(folder, ObjectPath):
    with tempfile.TemporaryDirectory() as temporary:
      new = pathlib.Path(temporary) / folder.name
      new.mkdir()
      yield new
      try:
        object_storage.upload(new, folder, last=last)
      except BaseException:
        with contextlib.suppress(OSError):
          folder.remove_tree()
        raise
    return
  new = folder.with_name(folder.name + ".new")
  shutil.rmtree(new, ignore_errors=True)
  with writing(folder):
    try:
      new.mkdir(parents=True)
      yield new
      for path in new.rglob("*"):
        if path.is_file():
          sync(path)
      if folder.exists():
        folder.rmdir()
      new.rename(folder)
      sync_folder(folder.parent)
    finally:
      shutil.rmtree(new, ignore_errors=True)


def write_text(path: pathlib.Path, text: str):
  """Write a text file atomically."""
  if isinstance(path, ObjectPath):
    path.write_text(text)
    return
  with replacing(path) as new:
    new.write_text(text)


def write_json(path: pathlib.Path, values: object):
  """Write a JSON file atomically."""
  write_text(path, json.dumps(values, indent=1) + "\n")


def sync(path: pathlib.Path):
  """Flush a file to disk (fsync)."""
  with open(path, "rb") as file:
    os.fsync(file.fileno())


def sync_folder(folder: pathlib.Path):
  """Flush the directory entries of a folder to disk (fsync)."""
  opened = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(opened)
  finally:
    os.close(opened)


def sha256(path: pathlib.Path) -> str:
  """Return the SHA-256 of a file in hex."""
  with open(path, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


class LockedError(ValueError):
  """Another process holds the lock."""


def _in_use(name, holder: str) -> LockedError:
  return LockedError(
    f"{name} is in use by {holder or 'another process'}: wait until it ends, or name another"
    " folder."
  )


@contextlib.contextmanager
def locked(
  path: pathlib.Path, *, name: object = None, wait: bool = False, report: Callable = print
):
  """Hold an exclusive lock on a file, which is created, or on an existing folder.

  The operating system releases the lock when the process ends, however it ends. On object storage
  the lock is a lease, an object called `lease`; that of a killed process expires.

  Args:
    path: File or folder to lock.
    name: The locked resource, for messages; the folder of the file by default.
    wait: Block until the lock is free instead of raising LockedError.
    report: Called with a one-line message if the file system does not support locks.
  """
  if isinstance(path, ObjectPath):
    lease = path.with_name(_LEASE) if path.name == "lock" else path / _LEASE
    in_use = lambda holder: _in_use(name or lease.parent, holder)
    with object_storage.leased(lease, wait=wait, in_use=in_use, report=report):
      yield
    return
  is_folder = path.is_dir()
  handle = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR | os.O_CREAT, 0o666)
  try:
    try:
      fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      holder = "" if is_folder else os.read(handle, 200).decode().strip()
      raise _in_use(name or path.parent, holder) from None
    except OSError as e:
      report(f"{path} cannot be locked ({e.strerror}): make sure that no other process uses it.")
    if not is_folder:
      os.truncate(handle, 0)
      os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    yield
  finally:
    os.close(handle)
