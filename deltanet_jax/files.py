"""Files that are whole or not there: written under another name, synced, renamed."""

import contextlib
import hashlib
import json
import os
import pathlib


@contextlib.contextmanager
def replacing(path: pathlib.Path):
  """Yields a path to write; at the end it takes the place of `path`, unless there was an error."""
  new = path.with_name(path.name + ".new")
  try:
    yield new
    sync(new)
    new.replace(path)
    sync_folder(path.parent)
  finally:
    new.unlink(missing_ok=True)


def write_text(path: pathlib.Path, text: str):
  with replacing(path) as new:
    new.write_text(text)


def write_json(path: pathlib.Path, values: object):
  write_text(path, json.dumps(values, indent=1) + "\n")


def sync(path: pathlib.Path):
  """Returns when the file is on the disk and not only in memory."""
  with open(path, "rb") as file:
    os.fsync(file.fileno())


def sync_folder(folder: pathlib.Path):
  """The same for the names in a folder."""
  opened = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(opened)
  finally:
    os.close(opened)


def sha256(path: pathlib.Path) -> str:
  with open(path, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()
