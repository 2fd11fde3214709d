import io
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from node.coordinator.data.rows import Rows
from node.errors import ConfigError, Reason, RefusedError
from node.limits import ROW_BYTES


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
    assert (rows.prompts, len(rows)) == (7, 10)
    assert json.loads(rows.row(9)) == {"n": 9}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 3 of d is not JSON"),
        ("[1]", "line 3 of d is list, not a JSON object"),
        ('{"n": NaN}', "line 3 of d is not JSON: NaN is no JSON number"),
        (json.dumps({"text": "x" * ROW_BYTES}), "line 3 of d is longer than 262144 bytes"),
        ("[" * 100_000, "line 3 of d is not JSON"),
        (b'{"a": "\xff"}', "line 3 of d is not JSON"),
    ],
)
def test_a_bad_row_is_named_by_its_line(indexed: Callable[..., Rows], line: str | bytes, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        indexed("{}", "", line, "{}")


@pytest.mark.parametrize("evaluation_rows", [2, 3])
def test_a_data_set_without_a_row_to_train_on_is_refused(evaluation_rows: int) -> None:
    with pytest.raises(ConfigError, match="leaves no row to train on: d has 2"):
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
    with pytest.raises(RefusedError, match=r"row 0 of d .* changed since the coordinator started") as error:
        rows.row(0)
    assert error.value.reason is Reason.DISK
