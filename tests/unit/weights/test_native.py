"""A library left over from other sources is not called."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.hatch_build import LIBRARY, SOURCE, compile_kernel
from node.weights.codec import native
from node.weights.codec.exponent_conditioned import choice


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a copy of the kernel's sources, whose library is the one to load."""
    (tmp_path / SOURCE.parent).mkdir(parents=True)
    for source in Path(native.__file__).parent.glob("*.[ch]"):
        shutil.copy(source, tmp_path / SOURCE.parent)
    monkeypatch.setattr(native, "LIBRARY_FILE", tmp_path / LIBRARY)
    native._library.cache_clear()
    yield tmp_path
    native._library.cache_clear()


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], dict[str, Any]]:
    """Return the fields of the one warning that was logged."""

    def fields() -> dict[str, Any]:
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        return vars(record)

    return fields


def compile_with(root: Path, old: str, new: str) -> None:
    source = root / SOURCE
    text = source.read_text()
    assert old in text
    source.write_text(text.replace(old, new))
    assert compile_kernel(root) is None


@pytest.mark.needs("gcc")
@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (f"ABI = {native.ABI}", "ABI = 77", f"its ABI number is 77, not {native.ABI}"),
        ("heterorl_abi", "heterorl_other", "heterorl_abi"),
    ],
    ids=["another number", "no number"],
)
def test_a_library_of_other_sources_is_left_alone_and_a_warning_says_what_to_do(
    root: Path, old: str, new: str, problem: str, told: Callable[[], dict[str, Any]]
) -> None:
    compile_with(root, old, new)
    assert choice.implementation.__wrapped__().name == "numpy"
    assert told()["file"] == str(root / LIBRARY)
    assert problem in told()["reason"]
    assert "install gcc or clang, then the node again" in told()["fix"]


def test_a_file_that_is_no_library_is_left_alone(root: Path, told: Callable[[], dict[str, Any]]) -> None:
    (root / LIBRARY).write_bytes(b"cut short")
    assert native.load() is None
    assert LIBRARY.name in told()["reason"]


@pytest.mark.needs("gcc")
def test_the_library_of_these_sources_is_used(root: Path) -> None:
    compile_with(root, f"ABI = {native.ABI}", f"ABI = {native.ABI}")
    assert native.load() is not None


def test_where_nothing_could_be_compiled_one_warning_says_what_it_costs_and_what_to_do(
    root: Path, told: Callable[[], dict[str, Any]]
) -> None:
    assert choice.implementation.__wrapped__().name == "numpy"
    assert "weights are coded in numpy, 30 to 100 times slower" in told()["msg"]
    assert "no C compiler" in told()["reason"]
    assert "install gcc or clang, then the node again" in told()["fix"]
