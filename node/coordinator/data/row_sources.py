"""Opens a data set: JSONL as it is, parquet and directories written out as JSONL first.

One format on disk means one way to read a row by its number. The copy is a file without a name in the state
directory, made at every start and gone with the process.
"""

import importlib.util
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, Final

from node.coordinator.data.data_config import DataConfig, DataSource
from node.coordinator.data.rows import HeldOut, Rows
from node.coordinator.work.task_size import NO_DATA, DataSeen
from node.errors import ConfigError, StartupError
from node.task_options import JsonlOptions, column_of

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
    data: DataConfig, *, scratch: Path, columns: Mapping[str, str] | None = None, known: DataSeen = NO_DATA
) -> Rows:
    """Open a data set and check every row; blocking.

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
            is_saved = any((path / name).exists() for name in _SAVED_BY_DATASETS)
            return _as_jsonl(_saved_rows(source) if is_saved else _hub_rows(source, scratch), scratch)
        if path.suffix == ".parquet":
            return _as_jsonl(_parquet_rows(path), scratch)
        return path.open("rb")
    except ImportError as error:
        raise ConfigError(
            key=key,
            value=str(path),
            source="the configuration",
            rule=f"this kind of data needs a package that is not installed: {error}",
            fix="pip install 'heterorl-node[data]', or write the rows as JSONL.",
        ) from error
    except (OSError, ValueError, KeyError) as error:
        raise StartupError(
            f"the data {path} cannot be read: {error}",
            fix="Correct [coordinator.data]: its path, split and subset.",
        ) from error


def _parquet_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    from pyarrow.parquet import ParquetFile  # an extra: imported only where it is used

    with ParquetFile(path) as file:
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
        for row in rows:
            # A date is its text. What JSON has no number for is found when the row is checked.
            file.write(json.dumps(row, ensure_ascii=False, default=str).encode() + b"\n")
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


def overlong(rows: Rows, options: JsonlOptions, *, tokenizer_file: Path, most: int) -> str:
    """Return a warning of the prompts of more than ``most`` tokens; empty where there are none.

    For dry runs. What a chat template adds is not counted; without the package ``tokenizers`` nothing is.
    """
    if importlib.util.find_spec("tokenizers") is None:
        return ""
    from tokenizers import Tokenizer  # samplers and learners have it

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    lengths = [
        len(tokenizer.encode(_text(json.loads(rows.row(index)), options), add_special_tokens=False).ids)
        for index in range(len(rows))
    ]
    long = [index for index, tokens in enumerate(lengths) if tokens > most]
    if not long:
        return ""
    return (
        f"{len(long)} of {len(rows)} prompts have more than {most} tokens, which is what model, "
        f"max_new_tokens and max_prompt_tokens leave; the first is row {long[0]} with {lengths[long[0]]}. "
        "They are set aside one by one during the run: shorten or remove these rows, or lower "
        "coordinator.max_new_tokens"
    )


def _text(row: object, options: JsonlOptions) -> str:
    assert isinstance(row, dict), "every row was checked"
    question = column_of(row, options.messages or options.prompt)
    if isinstance(question, list):
        question = "\n".join(str(message.get("content")) for message in question)
    return f"{options.system}\n{question}" if options.system else str(question)
