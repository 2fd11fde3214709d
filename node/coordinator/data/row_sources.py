"""Opens a data set: JSONL as it is; parquet, CSV, packed files and directories written out as JSONL first.

One format on disk means one way to read a row by its number. The copy is a file without a name in the state
directory, made at every start and gone with the process.
"""

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Final

from node.coordinator.data.data_config import DataConfig, DataSource
from node.coordinator.data.data_files import ShardError, check_shards, files_of
from node.coordinator.data.row_json import write_json
from node.coordinator.data.rows import HeldOut, RowCheck, Rows
from node.coordinator.data.text_rows import is_plain, refuse_others, text_rows
from node.coordinator.work.terms.run_data import NO_DATA, DataSeen
from node.errors import ConfigError, StartupError

_SAVED_BY_DATASETS: Final = ("dataset_dict.json", "state.json")
"""Files in a directory that ``save_to_disk`` wrote."""


def scratch_directory() -> Path:
    """Return the directory for files without a name of a command, TMPDIR or another that can be written.

    Raises:
        StartupError: there is none.
    """
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise StartupError(
            "no directory for temporary files can be written",
            fix="Set TMPDIR to a directory of this user's, on a disk that is neither full nor read-only.",
        ) from error


def open_rows(
    data: DataConfig,
    *,
    scratch: Path,
    columns: Mapping[str, str] | None = None,
    known: DataSeen = NO_DATA,
    check: RowCheck | None = None,
) -> Rows:
    """Open a data set and check every row; blocking.

    Args:
        columns: That the first row of each file must have, by the option that names them.
        known: What the ledger says of the data.
        check: Of each row; None: none. What it refuses is in ``Rows.tally``.
    Raises:
        ConfigError: a row is bad, there are too few, a column or a package is missing.
        StartupError: it cannot be read.
    """
    evaluation = data.evaluation_source
    if evaluation is not None and evaluation.path == data.file and not data.file.is_dir():
        raise ConfigError(
            key="coordinator.data.evaluation_split",
            value=evaluation.split,
            source="the configuration",
            rule=f"has no meaning for {data.file.name}, which is one file and has no splits",
            fix="Set coordinator.data.evaluation_file, or leave both out to hold out the last rows.",
        )
    with ExitStack() as opened:
        file = opened.enter_context(_opened(data.source, key="coordinator.data.file", scratch=scratch))
        held_out = None
        if evaluation is not None:
            key = "coordinator.data.evaluation_file"
            held_out_file = opened.enter_context(_opened(evaluation, key=key, scratch=scratch))
            held_out = HeldOut(held_out_file, _name(evaluation))
        rows = Rows(
            file,
            name=_name(data.source),
            evaluation_rows=data.evaluation_rows,
            held_out=held_out,
            known=known,
            check=check,
        )
        rows.check_columns(columns or {})
        opened.pop_all()  # they are the rows' from here on
    return rows


def _name(source: DataSource) -> str:
    return f"{source.path.name} ({source.split})" if source.path.is_dir() else source.path.name


def _opened(source: DataSource, *, key: str, scratch: Path) -> BinaryIO:
    path = source.path
    try:
        if path.is_dir():
            check_shards(path, source.split)
            is_saved = any((path / name).exists() for name in _SAVED_BY_DATASETS)
            return _as_jsonl(_saved_rows(source) if is_saved else _hub_rows(source, scratch), scratch)
        files = files_of(path)
        if len(files) == 1 and files[0].suffix != ".parquet" and is_plain(files[0]):
            return files[0].open("rb")
        return _as_jsonl(chain.from_iterable(map(_rows_of, files)), scratch)
    except ImportError as error:
        raise ConfigError(
            key=key,
            value=str(path),
            source="the configuration",
            rule=f"this kind of data needs a package that is not installed: {error}",
            fix="pip install 'heterorl-node[data]', or write the rows as JSONL.",
        ) from error
    except ShardError as error:
        raise ConfigError(
            key=key, value=str(path), source="the configuration", rule=str(error), fix="Correct it."
        ) from error
    except (OSError, ValueError, KeyError) as error:
        raise StartupError(
            f"the data {path} cannot be read: {error}",
            fix="Correct [coordinator.data]: its path, split and subset.",
        ) from error


def _rows_of(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a file that is not plain JSONL, or is one of several."""
    return _parquet_rows(path) if path.suffix == ".parquet" else text_rows(path)


def _parquet_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    from pyarrow.parquet import ParquetFile  # an extra: imported only where it is used

    with path.open("rb") as raw:
        if not (head := raw.read(64)).startswith(b"PAR1"):
            refuse_others(head)
    with ParquetFile(path) as file:
        names = file.schema_arrow.names
        if len(set(names)) < len(names):
            raise ValueError(f"{path.name} has two columns of the same name: {', '.join(names):.300}")
        for batch in file.iter_batches():
            yield from batch.to_pylist()


def _saved_rows(source: DataSource) -> Iterator[Mapping[str, Any]]:
    from datasets import DatasetDict, load_from_disk  # likewise

    saved = load_from_disk(str(source.path))
    if isinstance(saved, DatasetDict):
        if source.split not in saved:
            raise ValueError(f"it has no split {source.split!r}, only {', '.join(saved)}")
        saved = saved[source.split]
    yield from saved


def _hub_rows(source: DataSource, scratch: Path) -> Iterator[Mapping[str, Any]]:
    """Read the parquet, JSON or CSV files of a data set as it was downloaded; no code of it is run."""
    from datasets import load_dataset  # likewise

    # It wants a directory for its cache, and a service's user may have no home.
    with tempfile.TemporaryDirectory(dir=scratch) as cache:
        yield from load_dataset(
            str(source.path), source.subset, split=source.split, cache_dir=cache, streaming=True
        )


def _as_jsonl(rows: Iterable[Mapping[str, Any]], scratch: Path) -> BinaryIO:
    file: BinaryIO = tempfile.TemporaryFile(dir=scratch)  # noqa: SIM115 - the rows keep it
    try:
        for number, row in enumerate(rows):
            try:
                file.write(write_json(row) + b"\n")
            except ValueError as error:
                raise ValueError(f"row {number}: {error}") from error
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file
