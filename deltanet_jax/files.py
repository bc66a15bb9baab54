"""Atomic file writes (temporary name, fsync, rename), file locks and checksums."""

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

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)

# `s3://bucket/run`, or `s3:/bucket/run`: pathlib drops the second slash.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def as_path(path: str | os.PathLike) -> pathlib.Path:
  """Return the path of a file or folder that a user named.

  Raises:
    ValueError: it is a URL, which pathlib would take for a folder called `s3:` or `gs:`.
  """
  if scheme := _URL.match(os.fspath(path)):
    raise ValueError(f"{path} is a URL, and {scheme[1]}:// is not supported: name a local path.")
  return pathlib.Path(path)


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
  new = path.with_name(path.name + ".new")
  try:
    yield new
    sync(new)
    new.replace(path)
    sync_folder(path.parent)
  finally:
    new.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(folder: pathlib.Path):
  """Yield a temporary folder to fill; on success it is renamed to `folder` atomically."""
  if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
    raise ValueError(f"{folder} is not empty: name a new folder.")
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


@contextlib.contextmanager
def locked(
  path: pathlib.Path, *, name: object = None, wait: bool = False, report: Callable = print
):
  """Hold an exclusive lock on a file, which is created, or on an existing folder.

  The operating system releases the lock when the process ends, however it ends.

  Args:
    path: File or folder to lock.
    name: The locked resource, for messages; the folder of the file by default.
    wait: Block until the lock is free instead of raising LockedError.
    report: Called with a one-line message if the file system does not support locks.
  """
  is_folder = path.is_dir()
  handle = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR | os.O_CREAT, 0o666)
  try:
    try:
      fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      holder = "" if is_folder else os.read(handle, 200).decode().strip()
      raise LockedError(
        f"{name or path.parent} is in use by {holder or 'another process'}: wait until it ends, or"
        " name another folder."
      ) from None
    except OSError as e:
      report(f"{path} cannot be locked ({e.strerror}): make sure that no other process uses it.")
    if not is_folder:
      os.truncate(handle, 0)
      os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    yield
  finally:
    os.close(handle)
