"""Data sets as people have them, read through the packages that wrote them."""

import bz2
import gzip
import json
import lzma
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from pydantic import ValidationError

from node.coordinator.data.data_config import DataConfig
from node.coordinator.data.row_sources import open_rows
from node.errors import ConfigError, StartupError

ROWS = [{"question": f"{n} + 1?", "answer": n + 1, "tags": ["sum", None]} for n in range(5)]


def read(path: Path, **settings: object) -> list[object]:
    return opened(path, **settings)[0]


def opened(path: Path, **settings: object) -> tuple[list[object], list[object]]:
    """Return the rows to train on and those to evaluate on."""
    rows = open_rows(DataConfig.model_validate({"file": path, **settings}), scratch=path.parent)
    try:
        training, evaluation = (
            [json.loads(rows.row(index)) for index in indices]
            for indices in (range(rows.prompts), rows.evaluation)
        )
    finally:
        rows.close()
    return training, evaluation


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
    import datasets  # here, as it takes a second: a run of other tests need not wait for it

    saved = datasets.Dataset.from_list(ROWS)
    (datasets.DatasetDict(dict.fromkeys(splits, saved)) if splits else saved).save_to_disk(tmp_path / "d")
    assert read(tmp_path / "d", split="train") == ROWS
    if splits:
        with pytest.raises(StartupError, match=r"no split 'dev', only train, test.* Correct"):
            read(tmp_path / "d", split="dev")


def test_what_json_cannot_say_is_named_by_its_row(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"x": 1.0}, {"x": float("inf")}]), path)
    with pytest.raises(StartupError, match=r"d\.parquet cannot be read: row 1: column 'x': it is infinite"):
        read(path)


SUMS = [{"q": "1+1=", "a": "2"}, {"q": 'say "é"\nnow', "a": "3"}]
LINES = "\n".join(json.dumps(row, ensure_ascii=False) for row in SUMS)
CSV = 'q,a\n1+1=,2\n"say ""é""\nnow",3\n'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("crlf.jsonl", LINES.replace("\n{", "\r\n{").encode()),
        ("bom.jsonl", b"\xef\xbb\xbf" + LINES.encode()),
        ("utf16.jsonl", LINES.encode("utf-16")),
        ("utf16-without-bom.jsonl", LINES.encode("utf-16-le")),
        ("commas.jsonl", LINES.replace("\n{", ",\n{").encode() + b",\n"),
        ("list.json", json.dumps(SUMS).encode()),
        ("printed.json", json.dumps(SUMS, indent=2).encode()),
        ("objects.json", "\n".join(json.dumps(row, indent=1) for row in SUMS).encode()),
        ("lines.jsonl.gz", gzip.compress(LINES.encode(), mtime=0)),
        ("packed.jsonl", gzip.compress(LINES.encode(), mtime=0)),
        ("list.json.bz2", bz2.compress(json.dumps(SUMS).encode())),
        ("lines.jsonl.xz", lzma.compress(LINES.encode())),
        ("table.csv", CSV.encode()),
        ("bom.csv", CSV.encode("utf-8-sig")),
        ("utf16.csv", CSV.encode("utf-16")),
        ("table.csv.gz", gzip.compress(CSV.encode(), mtime=0)),
        ("semicolons.csv", CSV.replace(",", ";").encode()),
        ("table.tsv", CSV.replace(",", "\t").encode()),
    ],
)
def test_text_files_are_read_as_people_have_them(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert read(tmp_path / name) == SUMS
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("cut.json", b'[{"q": "1"}, {"q": ', "after 1 rows, '{\"q\": ' is not a row of JSON"),
        ("cut.json", b'[{"q": "1"},', "after 1 rows it ends in the middle of its list"),
        ("more.json", b'[{"q": "1"}] x', "after its list of 1 rows there is something else: 'x'"),
        ("numbers.json", b"[1, 2]", "after 0 rows there is a number, not an object"),
        ("ragged.csv", b"q,a\n1,2,3\n", "line 2 has 3 fields, and the first line names 2 columns"),
        ("open.csv", b'q,a\n"1,2\n', "is not CSV"),
        ("twice.csv", b"q,q\n1,2\n", "two columns of its first line have the same name"),
        ("latin1.csv", "q\né\n".encode("latin-1"), "it is not utf-8"),
        ("latin1.jsonl", '{"q": "é"}'.encode("latin-1"), "iconv -f LATIN1 -t UTF-8"),
        ("cut.jsonl.gz", gzip.compress(LINES.encode(), mtime=0)[:-9], "compressed data is damaged"),
        ("rows.jsonl.zst", b"\x28\xb5\x2f\xfd", "unpack it with zstd -d"),
        ("rows.xlsx", b"PK\x03\x04", "save the table as CSV"),
        ("rows.jsonl", b"version https://git-lfs.github.com/spec/v1\n", "run git lfs pull"),
        ("rows.parquet", b"version https://git-lfs.github.com/spec/v1\n", "run git lfs pull"),
        ("rows.jsonl", b"<!DOCTYPE html>", "a web page, not the data"),
        ("big.jsonl", b'{"q": 1e400}', "1e400 is beyond the largest number that a float holds"),
        ("big.json", b'[{"q": 1e400}]', "1e400 is beyond"),
        ("twice.jsonl", b'{"q": "1", "a": {"b": 1, "b": 2}}', "the key 'b' is there twice"),
        ("long.jsonl", b'{"q": ' + b"9" * 5000 + b"}", "a number has more than 4300 digits"),
        ("comma.jsonl", b'{"q": 1}\n{"q": 2},', "line 2 of comma.jsonl .* and a comma stands behind it"),
        ("empty.jsonl", b"", "empty.jsonl has no rows"),
        ("empty.json", b"[]", "empty.json has no rows"),
    ],
)
def test_a_file_that_cannot_be_read_says_what_it_is_and_what_to_do(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises((ConfigError, StartupError), match=said):
        read(tmp_path / name)


def test_columns_of_parquet_are_what_the_data_mean(tmp_path: Path) -> None:
    """pandas has floats where an int was missing, and NaN or NaT for what is missing."""
    path = tmp_path / "d.parquet"
    columns = {
        "int": pyarrow.array([42.0, float("nan")]),
        "day": pyarrow.array([0, None], pyarrow.timestamp("ms")),
        "inside": pyarrow.array([{"x": float("nan")}, None]),
        "price": pyarrow.array([Decimal("42.00"), Decimal("0.50")]),
        "bytes": pyarrow.array([b"hi", b"\xff"]),
        "list": pyarrow.array([[1.0, float("nan")], []]),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    assert read(path) == [
        {
            "int": 42.0,
            "day": "1970-01-01 00:00:00",
            "inside": {"x": None},
            "price": "42",
            "bytes": "hi",
            "list": [1.0, None],
        },
        {"int": None, "day": None, "inside": None, "price": "0.5", "bytes": {"base64": "/w=="}, "list": []},
    ]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_arrays([pyarrow.array([1]), pyarrow.array([2])], names=["q", "q"]), path
    )
    with pytest.raises(StartupError, match="has two columns of the same name"):
        read(path)


@pytest.mark.parametrize(
    ("names", "file", "said"),
    [
        (["train-00000-of-00002.parquet"], "train-00000-of-00002.parquet", "'train-\\*.parquet'"),
        (["train-00000-of-00002.jsonl"], "train-*.jsonl", "1 of the 2 shards of train are missing"),
        (["data/train-00000-of-00002-0a1b.parquet"], "", "1 of the 2 shards of train .* such as number 1"),
        (["train-00001-of-00002.jsonl", "train-00002-of-00002.jsonl"], "train-*", None),
        (["train-00000-of-00001.jsonl"], "train-00000-of-00001.jsonl", None),
        (["train-00000-of-00001.jsonl", "test-00000-of-00002.jsonl"], "", None),
    ],
)
def test_a_shard_that_is_missing_is_noticed(
    tmp_path: Path, names: Sequence[str], file: str, said: str | None
) -> None:
    root = tmp_path / "set"
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"n": number}]), root / name)
        else:
            (root / name).write_text(json.dumps({"n": number}))
    if said is None:
        wanted = [{"n": n} for n, name in enumerate(names) if not name.startswith("test")]
        assert read(root / file) == wanted
    else:
        with pytest.raises(ConfigError, match=said):
            read(root / file)


@pytest.mark.parametrize("name", ["none.jsonl", "none.parquet", "directory"])
def test_what_is_not_there_or_no_data_set_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "directory").mkdir()
    with pytest.raises(StartupError, match=f"the data .*{name} cannot be read"):
        read(tmp_path / name)


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """Return a data set with subsets, splits and shards as a download from the Hub leaves it."""
    root = tmp_path / "sums"
    for name, rows in {
        "main/train-00000-of-00002.parquet": ROWS[:2],
        "main/train-00001-of-00002.parquet": ROWS[2:],
        "main/test-00000-of-00001.parquet": [{**row, "answer": -1} for row in ROWS],
        "hard/train-00000-of-00001.parquet": ROWS[:1],
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), root / name)
    subsets = {"main": ("train", "test"), "hard": ("train",)}
    configs = [
        {
            "config_name": subset,
            "data_files": [{"split": split, "path": f"{subset}/{split}-*"} for split in splits],
        }
        for subset, splits in subsets.items()
    ]
    (root / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n")
    return root


def test_a_data_set_is_read_as_the_hub_has_it(hub: Path) -> None:
    assert read(hub, subset="main") == read(hub / "main") == ROWS
    assert read(hub, subset="hard") == ROWS[:1]
    for settings, said in (
        ({}, "Config name is missing.*'main'"),
        ({"subset": "main", "split": "dev"}, r"Bad split: dev.*'test'"),
        ({"subset": "soft"}, "soft.*not found"),
    ):
        with pytest.raises(StartupError, match=rf"(?s){said}.* Correct \[coordinator\.data\]"):
            read(hub, **settings)


def test_a_service_without_a_home_reads_it_and_leaves_nothing(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_DATASETS_CACHE", "DOWNLOADED_DATASETS_PATH", "HF_MODULES_CACHE"):
        monkeypatch.setattr(f"datasets.config.{name}", "/proc/none")
    assert read(hub, subset="main") == ROWS
    assert list(tmp_path.iterdir()) == [hub]


def test_a_directory_of_jsonl_files_is_a_data_set_too(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for split in ("train", "test"):
        (tmp_path / "d" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    assert opened(tmp_path / "d", evaluation_split="test", evaluation_rows=3) == (ROWS, ROWS[:3])


def test_rows_of_another_split_or_file_are_held_out(hub: Path, tmp_path: Path) -> None:
    training, evaluation = opened(hub, subset="main", evaluation_split="test", evaluation_rows=2)
    assert training == ROWS
    assert evaluation == [{**row, "answer": -1} for row in ROWS[:2]]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "test.jsonl").write_text('{"answer": 7}\n\n{"answer": 8}\nnot read, not even as JSON')
    settings = {"evaluation_file": tmp_path / "test.jsonl", "evaluation_rows": 2}
    assert opened(tmp_path / "train.jsonl", **settings) == (ROWS, [{"answer": 7}, {"answer": 8}])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"evaluation_file": "test.jsonl", "evaluation_rows": 3}, r"is more than test\.jsonl has: 2"),
        ({"evaluation_file": "test.jsonl"}, "set evaluation_rows to the number of rows"),
        ({"evaluation_file": "train.jsonl", "evaluation_rows": 1}, "are those to train on"),
        ({"evaluation_split": "test", "evaluation_rows": 1}, r"train\.jsonl, which is one file"),
        ({"evaluation_file": "none.jsonl", "evaluation_rows": 1}, r"none\.jsonl cannot be read"),
    ],
)
def test_rows_that_cannot_be_held_out_are_named(
    tmp_path: Path, settings: Mapping[str, object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train", "test"):
        Path(f"{name}.jsonl").write_text("{}\n{}")
    with pytest.raises((ConfigError, StartupError, ValidationError), match=said):
        opened(Path("train.jsonl"), **settings)


def test_every_file_has_the_columns(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"q": 1}')
    (tmp_path / "test.jsonl").write_text('{"question": 1}')
    data = DataConfig(
        file=tmp_path / "train.jsonl", evaluation_file=tmp_path / "test.jsonl", evaluation_rows=1
    )
    with pytest.raises(ConfigError, match=r"test\.jsonl has no such column: its first row has question"):
        open_rows(data, scratch=tmp_path, columns={"prompt": "q"})
