"""Data sets as people have them, read through the packages that wrote them."""

import json
from collections.abc import Sequence
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from node.coordinator.data.row_sources import open_rows
from node.errors import ConfigError, StartupError

ROWS = [{"question": f"{n} + 1?", "answer": n + 1, "tags": ["sum", None]} for n in range(5)]


def read(path: Path, *, split: str = "train") -> list[object]:
    rows = open_rows(path, split=split, evaluation_rows=0, scratch=path.parent)
    try:
        return [json.loads(rows.row(index)) for index in range(len(rows))]
    finally:
        rows.close()


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


def test_jsonl_is_read_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    assert read(tmp_path / "d.jsonl") == ROWS


def test_parquet_is_read_row_by_row_and_leaves_no_copy(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=2)
    assert read(path) == ROWS
    assert list(tmp_path.glob("*")) == [path]


@pytest.mark.parametrize("splits", [(), ("train", "test")])
def test_a_saved_data_set_is_read_with_its_split(tmp_path: Path, splits: Sequence[str]) -> None:
    saved = datasets.Dataset.from_list(ROWS)
    (datasets.DatasetDict(dict.fromkeys(splits, saved)) if splits else saved).save_to_disk(tmp_path / "d")
    assert read(tmp_path / "d", split="train") == ROWS
    if splits:
        with pytest.raises(StartupError, match=r"no split 'dev', only train, test: set coordinator"):
            read(tmp_path / "d", split="dev")


def test_what_json_cannot_say_is_named_by_its_row(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"x": 1.0}, {"x": float("nan")}]), path)
    with pytest.raises(ConfigError, match=r"line 2 of d\.parquet is not JSON: NaN"):
        read(path)


@pytest.mark.parametrize("name", ["none.jsonl", "none.parquet", "directory"])
def test_what_is_not_there_or_no_data_set_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "directory").mkdir()
    with pytest.raises(StartupError, match=f"the data .*{name} cannot be read"):
        read(tmp_path / name)
