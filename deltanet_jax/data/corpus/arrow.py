"""Text columns of Parquet files and of Hugging Face `datasets` folders (Arrow files), streamed.

Needs pyarrow (extra `parquet`). Files are read in batches of at most `_BATCH` documents: memory
does not grow with a file or with its row groups.
"""

import json
import pathlib
from collections.abc import Iterator

from deltanet_jax._extras import require

PARQUET, ARROW = ".parquet", ".arrow"
SUFFIXES = (PARQUET, ARROW)
_BATCH = 256  # documents decoded at a time
_BUFFER = 1 << 20  # bytes of a Parquet column read at a time

# What `Dataset.save_to_disk` and `DatasetDict.save_to_disk` write next to the Arrow files.
_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"


class ColumnError(ValueError):
  """The file has no such column of strings; the message lists its columns."""


def texts(path: pathlib.Path, column: str) -> Iterator[tuple[float, bytes]]:
  """Yield each document of a file as UTF-8, with the fraction of the file that has been read.

  A null is an empty document.

  Raises:
    ColumnError: there is no such column, or it does not hold strings.
    MissingExtraError: pyarrow is not installed.
  """
  require(f"Reading {path.name}", "pyarrow")
  if path.suffix == PARQUET:
    yield from _parquet(path, column)
  else:
    yield from _arrow(path, column)


def _parquet(path, column):
  from pyarrow import parquet

  # Without pre_buffer and with a buffer size, a column chunk is read page by page: some dumps are
  # one row group of gigabytes.
  with parquet.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER) as file:
    _check(path, file.schema_arrow, column)
    done, total = 0, file.metadata.num_rows
    for batch in file.iter_batches(_BATCH, columns=[column], use_threads=False):
      for text in batch.column(0):
        done += 1
        yield done / total, (text.as_py() or "").encode()


def _arrow(path, column):
  import pyarrow as pa

  with pa.OSFile(str(path)) as raw:
    # `datasets` writes the streaming format, Feather and others the file format.
    is_file = raw.read(6) == b"ARROW1"
    raw.seek(0)
    reader = pa.ipc.open_file(raw) if is_file else pa.ipc.open_stream(raw)
    _check(path, reader.schema, column)
    if is_file:
      batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:
      batches = iter(reader)
    size = raw.size() or 1
    for batch in batches:
      for text in batch.column(column):
        yield min(raw.tell() / size, 1.0), (text.as_py() or "").encode()


def _check(path, schema, column: str):
  import pyarrow as pa

  strings = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
  is_text = lambda kind: (
    any(test(kind) for test in strings)
    or (pa.types.is_dictionary(kind) and is_text(kind.value_type))
  )
  if column in schema.names and is_text(schema.field(column).type):
    return
  known = ", ".join(f"{field.name} ({field.type})" for field in schema)
  wrong = "does not hold strings" if column in schema.names else "does not exist"
  raise ColumnError(
    f"{path}: column {column!r} {wrong}; the file has {known}. Choose one with --text_field."
  )


def dataset_files(folder: pathlib.Path) -> list[pathlib.Path] | None:
  """The Arrow files of a folder written by `save_to_disk`, in order; None for any other folder.

  Raises:
    ValueError: several splits, a subset by indices, or files that are missing.
  """
  if (folder / _SPLITS).is_file():
    splits = _json(folder / _SPLITS).get("splits") or []
    if len(splits) != 1:
      raise ValueError(
        f"{folder} is a dataset with the splits {', '.join(splits) or '(none)'}: name one of them,"
        f" as {folder / (splits[0] if splits else 'train')}."
      )
    folder = folder / splits[0]
  if not ((folder / _STATE).is_file() and (folder / _INFO).is_file()):
    return None
  state = _json(folder / _STATE)
  names = [entry["filename"] for entry in state.get("_data_files") or []]
  if state.get("_indices_data_files") or state.get("_indices_files"):
    raise ValueError(
      f"{folder} is a dataset with an index (a selection or shuffle): write it again with"
      " dataset.flatten_indices().save_to_disk(...)."
    )
  if missing := [name for name in names if not (folder / name).is_file()]:
    raise ValueError(f"{folder} lacks {missing[0]}, which its {_STATE} lists: copy it again.")
  return [folder / name for name in names]


def is_metadata(file: pathlib.Path) -> bool:
  """Whether a JSON file describes a dataset next to it and is not text."""
  if file.name == _SPLITS:
    return True
  return file.name in (_STATE, _INFO) and any(file.parent.glob(f"*{ARROW}"))


def _json(path: pathlib.Path) -> dict:
  try:
    values = json.loads(path.read_text())
  except ValueError as e:
    raise ValueError(f"{path} is damaged ({e}): copy the dataset again.") from e
  return values if isinstance(values, dict) else {}
