from pathlib import Path

import numpy as np

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


def test_the_newest_saved_version_is_read_back_and_nothing_else_is_left(tmp_path: Path) -> None:
    saved(tmp_path / "held.words")
    newer = saved(tmp_path / "held.words", number=8, seed=2)
    found, into = loaded(tmp_path / "held.words")
    assert found == newer
    np.testing.assert_array_equal(into.words, random_words(2))
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


def test_a_copy_that_is_cut_or_has_more_after_it_is_no_copy(tmp_path: Path) -> None:
    path = tmp_path / "held.words"
    saved(path)
    content = path.read_bytes()
    for other in (*(content[:size] for size in (0, 3, 40, 47, 48, 1001)), content + bytes(2)):
        path.write_bytes(other)
        assert is_no_copy(path), len(other)


def test_the_copy_of_another_model_is_no_copy(tmp_path: Path) -> None:
    saved(tmp_path / "held.words")
    assert is_no_copy(tmp_path / "held.words", Layout.of([TensorSpec("a", (LAYOUT.words,))]))
