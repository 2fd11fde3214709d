"""Opens a data set: JSONL as it is, parquet and ``datasets`` directories written out as JSONL first.

One format on disk means one way to read a row by its number. The copy is a file without a name in the state
directory, made at every start and gone with the process.
"""

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from node.coordinator.data.rows import Rows
from node.errors import ConfigError, StartupError


def open_rows(
    path: Path,
    *,
    split: str,
    evaluation_rows: int,
    scratch: Path,
    columns: Mapping[str, str] | None = None,
) -> Rows:
    """Open a data set and check every row; blocking.

    Args:
        path: A .parquet file, a directory that ``datasets`` saved, or else JSONL.
        split: Of a directory with several.
        scratch: Directory with room for a copy of what is not JSONL.
        columns: Option of the task -> column that the first row must have.
    Raises:
        ConfigError: a row is bad, there are too few, a column or a package is missing.
        StartupError: it cannot be read.
    """
    try:
        file = _opened(path, split=split, scratch=scratch)
    except ImportError as error:
        raise ConfigError(
            key="coordinator.data.file",
            value=str(path),
            source="the configuration",
            rule=f"this kind of data needs a package that is not installed: {error}",
            fix="pip install 'heterorl-node[data]', or write the rows as JSONL.",
        ) from error
    except (OSError, ValueError, KeyError) as error:
        raise StartupError(f"the data {path} cannot be read: {error}", fix="Check the path.") from error
    try:
        rows = Rows(file, name=path.name, evaluation_rows=evaluation_rows)
        rows.check_columns(columns or {})
    except ConfigError:
        file.close()
        raise
    return rows


def _opened(path: Path, *, split: str, scratch: Path) -> BinaryIO:
    if path.is_dir():
        return _as_jsonl(_saved_rows(path, split), scratch)
    if path.suffix == ".parquet":
        return _as_jsonl(_parquet_rows(path), scratch)
    return path.open("rb")


def _parquet_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    from pyarrow.parquet import ParquetFile  # an extra: imported only where it is used

    with ParquetFile(path) as file:
        for batch in file.iter_batches():
            yield from batch.to_pylist()


def _saved_rows(path: Path, split: str) -> Iterator[Mapping[str, Any]]:
    from datasets import DatasetDict, load_from_disk  # likewise

    saved = load_from_disk(str(path))
    if isinstance(saved, DatasetDict):
        if split not in saved:
            raise ValueError(
                f"it has no split {split!r}, only {', '.join(saved)}: set coordinator.data.split"
            )
        saved = saved[split]
    yield from saved


def _as_jsonl(rows: Iterable[Mapping[str, Any]], scratch: Path) -> BinaryIO:
    file: BinaryIO = tempfile.TemporaryFile(dir=scratch)  # noqa: SIM115 - the rows keep it
    try:
        for row in rows:
            # A date is its text. What JSON has no number for is found when the row is checked.
            file.write(json.dumps(row, ensure_ascii=False, default=str).encode() + b"\n")
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file
