import io
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import pytest

from node.coordinator.data.rows import HeldOut, Rows
from node.coordinator.work.terms.run_data import NO_DATA, DataSeen
from node.errors import ConfigError, Reason
from node.values.limits import ROW_BYTES
from support.refusals import misconfigured, naming, refused


@pytest.fixture
def indexed(tmp_path: Path) -> Iterator[Callable[..., Rows]]:
    """Return a function that indexes a file of the lines given, which is closed afterwards."""
    with ExitStack() as files:

        def index(*lines: str | bytes, evaluation_rows: int = 0) -> Rows:
            path = tmp_path / "rows"
            path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
            file = files.enter_context(path.open("rb"))
            return Rows(file, name="d", evaluation_rows=evaluation_rows)

        yield index


def test_rows_are_read_by_number_and_blank_lines_do_not_count(indexed: Callable[..., Rows]) -> None:
    rows = indexed('{"n": 0}', "", '  {"n": 1, "ü": "é"}\r', "", '{"n": 2}', "")
    assert [json.loads(rows.row(index))["n"] for index in (2, 0, 1)] == [2, 0, 1]
    assert len(rows) == 3
    assert rows.longest_bytes == len('{"n": 1, "ü": "é"}'.encode())


def test_the_last_rows_are_held_out(indexed: Callable[..., Rows]) -> None:
    rows = indexed(*(json.dumps({"n": n}) for n in range(10)), evaluation_rows=3)
    assert (rows.prompts, rows.evaluation) == (7, range(7, 10))
    assert json.loads(rows.row(rows.evaluation[-1])) == {"n": 9}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", ("line 3 of d", "JSON")),
        ("[1]", ("line 3 of d", "list")),
        ('{"n": NaN}', ("line 3 of d", "NaN", "null")),
        (json.dumps({"text": "x" * ROW_BYTES}), ("line 3 of d", "262144 bytes")),
        ("[" * 100_000, ("line 3 of d", "JSON")),
        (b'{"a": "\xff"}', ("line 3 of d", "JSON")),
    ],
)
def test_a_bad_row_is_named_by_its_line(
    indexed: Callable[..., Rows], line: str | bytes, said: tuple[str, ...]
) -> None:
    with naming(ConfigError, *said):
        indexed("{}", "", line, "{}")


@pytest.mark.parametrize("evaluation_rows", [2, 3])
def test_a_data_set_without_a_row_to_train_on_is_refused(evaluation_rows: int) -> None:
    with misconfigured("d has 2", key="coordinator.data.evaluation_rows"):
        Rows(io.BytesIO(b"{}\n{}\n"), name="d", evaluation_rows=evaluation_rows)


def test_the_digest_is_of_the_rows_and_their_order(indexed: Callable[..., Rows]) -> None:
    digest = indexed('{"n":1}', '{"n":2}').digest
    assert indexed('{"n":1}', "", '{"n":2}', "").digest == digest
    assert indexed('{"n":2}', '{"n":1}').digest != digest


def test_a_file_that_is_removed_is_still_read_and_one_that_is_overwritten_is_noticed(
    indexed: Callable[..., Rows], tmp_path: Path
) -> None:
    rows = indexed('{"n": 1}', '{"n": 2}')
    with (tmp_path / "rows").open("r+b") as file:
        file.write(b'{"n": 9}')
    (tmp_path / "rows").unlink()
    assert rows.row(1) == b'{"n": 2}'
    with refused(Reason.DISK, "row 0 of d"):
        rows.row(0)


def lines(*numbers: int) -> bytes:
    return b"".join(b'{"n": %d}\n' % n for n in numbers)


@pytest.mark.parametrize(
    "has_own_file", [False, True], ids=["the last rows held out", "rows of another file"]
)
def test_rows_that_are_added_come_after_all_others_which_keep_their_numbers(
    has_own_file: bool, tmp_path: Path
) -> None:
    def on_disk(content: bytes) -> BinaryIO:
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        path.write_bytes(content)
        return files.enter_context(path.open("rb"))

    def opened(*added: int, known: DataSeen = NO_DATA) -> Rows:
        training, held_out = range(4), range(90, 92)
        if has_own_file:
            other = HeldOut(on_disk(lines(*held_out, 99)), "e")
            return Rows(
                on_disk(lines(*training, *added)), name="d", evaluation_rows=2, held_out=other, known=known
            )
        return Rows(on_disk(lines(*training, *held_out, *added)), name="d", evaluation_rows=2, known=known)

    with ExitStack() as files:
        first = opened()
        assert (first.prompts, first.evaluation) == (4, range(4, 6))
        grown = opened(10, 11, known=first.seen)
        assert [json.loads(grown.row(index))["n"] for index in range(8)] == [0, 1, 2, 3, 90, 91, 10, 11]
        assert (grown.prompts, grown.evaluation) == (6, range(4, 6))
        assert grown.known_part == first.digest != grown.digest
        again = opened(10, 11, 12, known=grown.seen)
        assert (again.known_part, again.prompts) == (grown.digest, 7)
        assert opened(5, 6, known=grown.seen).known_part != grown.digest
