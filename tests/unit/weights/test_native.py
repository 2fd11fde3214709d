"""A library left over from other sources is not called."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from node.weights.codec import native
from node.weights.codec.exponent_conditioned import choice


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return where the library to load is looked for: there is none yet."""
    monkeypatch.setattr(native, "LIBRARY_FILE", tmp_path / "kernel.so")
    native._library.cache_clear()
    yield tmp_path / "kernel.so"
    native._library.cache_clear()


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], dict[str, Any]]:
    """Return the fields of the one warning that was logged."""

    def fields() -> dict[str, Any]:
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        return vars(record)

    return fields


@pytest.mark.needs("gcc")
@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("int heterorl_abi(void) { return 77; }", f"its ABI number is 77, not {native.ABI}"),
        ("int heterorl_other(void) { return 2; }", "heterorl_abi"),
    ],
    ids=["another number", "no number"],
)
def test_a_library_of_other_sources_is_left_alone_and_a_warning_says_what_to_do(
    library: Path, source: str, problem: str, told: Callable[[], dict[str, Any]]
) -> None:
    compiler = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(compiler, input=source.encode(), check=True)
    assert choice.implementation.__wrapped__().name == "numpy"
    assert told()["file"] == str(library)
    assert problem in told()["reason"]
    assert "install gcc or clang, then the node again" in told()["fix"]


def test_a_file_that_is_no_library_is_left_alone(library: Path, told: Callable[[], dict[str, Any]]) -> None:
    library.write_bytes(b"cut short")
    assert native.load() is None
    assert library.name in told()["reason"]


@pytest.mark.needs("kernel")
def test_the_library_of_these_sources_is_used(library: Path) -> None:
    shutil.copy(Path(native.__file__).with_name("kernel.so"), library)
    assert native.load() is not None


def test_where_nothing_could_be_compiled_one_warning_says_what_it_costs_and_what_to_do(
    library: Path, told: Callable[[], dict[str, Any]]
) -> None:
    assert choice.implementation.__wrapped__().name == "numpy"
    assert "weights are coded in numpy, 30 to 100 times slower" in told()["msg"]
    assert "no C compiler" in told()["reason"]
    assert "install gcc or clang, then the node again" in told()["fix"]
