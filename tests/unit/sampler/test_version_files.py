from pathlib import Path

import numpy as np
import pytest

from node.values.policy import PolicyVersion
from node.weights.format.layout import Layout, TensorSpec
from sampler.engines.words.model_words import ArrayWords, version_of
from sampler.versions.version_files import load_held, save_held
from support.weights import LAYOUT, random_words


def saved(path: Path, number: int = 7, seed: int = 1) -> PolicyVersion:
    words = ArrayWords(random_words(seed))
    version = version_of(number, words, layout=LAYOUT)
    save_held(path, version, words, layout=LAYOUT)
    return version


def loaded(path: Path, layout: Layout = LAYOUT) -> tuple[PolicyVersion | None, ArrayWords]:
    into = ArrayWords(np.zeros(layout.words, np.uint16))
    return load_held(path, layout=layout, into=into), into


def is_no_copy(path: Path, layout: Layout = LAYOUT) -> bool:
    """Whether nothing is loaded, and nothing written."""
    version, into = loaded(path, layout)
    return version is None and not into.words.any()


def test_a_saved_version_is_read_back(tmp_path: Path) -> None:
    version = saved(tmp_path / "held.words")
    found, into = loaded(tmp_path / "held.words")
    assert found == version
    np.testing.assert_array_equal(into.words, random_words(1))


def test_a_newer_copy_replaces_the_older_and_leaves_nothing_else(tmp_path: Path) -> None:
    saved(tmp_path / "held.words")
    newer = saved(tmp_path / "held.words", number=8, seed=2)
    assert loaded(tmp_path / "held.words")[0] == newer
    assert [path.name for path in tmp_path.iterdir()] == ["held.words"]


def test_without_a_copy_there_is_none(tmp_path: Path) -> None:
    assert is_no_copy(tmp_path / "held.words")


def test_a_flipped_bit_anywhere_makes_it_no_copy(tmp_path: Path) -> None:
    path = tmp_path / "held.words"
    saved(path)
    content = path.read_bytes()
    for bit in [*range(8 * 56), *range(8 * 56, 8 * len(content), 997)]:
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert is_no_copy(path), bit


@pytest.mark.parametrize("size", [0, 3, 40, 47, 48, 1001])
def test_a_truncated_copy_is_no_copy(tmp_path: Path, size: int) -> None:
    path = tmp_path / "held.words"
    saved(path)
    path.write_bytes(path.read_bytes()[:size])
    assert is_no_copy(path)


def test_a_copy_with_more_after_it_is_no_copy(tmp_path: Path) -> None:
    path = tmp_path / "held.words"
    saved(path)
    path.write_bytes(path.read_bytes() + bytes(2))
    assert is_no_copy(path)


def test_the_copy_of_another_model_is_no_copy(tmp_path: Path) -> None:
    saved(tmp_path / "held.words")
    assert is_no_copy(tmp_path / "held.words", Layout.of([TensorSpec("a", (LAYOUT.words,))]))
