"""A library left over from other sources is not called."""

import shutil
from pathlib import Path

import pytest

from deploy.hatch_build import LIBRARY, SOURCE, compile_kernel
from node.weights.codec import native
from node.weights.codec.exponent_conditioned import choice


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the kernel's sources, whose library is the one to load."""
    (tmp_path / SOURCE.parent).mkdir(parents=True)
    for source in Path(native.__file__).parent.glob("*.[ch]"):
        shutil.copy(source, tmp_path / SOURCE.parent)
    monkeypatch.setattr(native, "LIBRARY_FILE", tmp_path / LIBRARY)
    return tmp_path


def compile_with(root: Path, old: str, new: str) -> None:
    source = root / SOURCE
    text = source.read_text()
    assert old in text
    source.write_text(text.replace(old, new))
    assert compile_kernel(root) is None


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (f"ABI = {native.ABI}", "ABI = 77", f"its ABI number is 77, not {native.ABI}"),
        ("heterorl_abi", "heterorl_other", "heterorl_abi"),
    ],
    ids=["another number", "no number"],
)
def test_a_library_of_other_sources_is_left_alone_and_a_warning_says_what_to_do(
    root: Path, old: str, new: str, problem: str
) -> None:
    compile_with(root, old, new)
    with pytest.warns(RuntimeWarning, match=problem) as told:
        assert choice.implementation.__wrapped__().name == "numpy"
    (warning,) = told
    assert str(root / LIBRARY) in str(warning.message)
    assert "Install the node again" in str(warning.message)


def test_a_file_that_is_no_library_is_left_alone(root: Path) -> None:
    (root / LIBRARY).write_bytes(b"cut short")
    with pytest.warns(RuntimeWarning, match=LIBRARY.name):
        assert native.load() is None


def test_the_library_of_these_sources_is_used(root: Path) -> None:
    compile_with(root, f"ABI = {native.ABI}", f"ABI = {native.ABI}")
    assert native.load() is not None


def test_where_nothing_could_be_compiled_a_warning_says_what_it_costs_and_what_to_do(root: Path) -> None:
    with pytest.warns(RuntimeWarning, match="there is no .*, so weights are coded in numpy") as told:
        assert choice.implementation.__wrapped__().name == "numpy"
    (warning,) = told
    assert str(root / LIBRARY) in str(warning.message)
    assert "Install gcc or clang, then the node again" in str(warning.message)
