from pathlib import Path

import numpy as np
import pytest

from node.weights.held import HeldPolicy
from node.weights.layout import Layout, TensorSpec
from sampler.held_file import load_held, save_held
from support.weights import LAYOUT, flip_bit, random_words


@pytest.fixture
def policy() -> HeldPolicy:
    return HeldPolicy.of(7, random_words(1), layout=LAYOUT)


def test_what_was_saved_is_read_back(tmp_path: Path, policy: HeldPolicy) -> None:
    save_held(tmp_path / "held.words", policy)
    loaded = load_held(tmp_path / "held.words", LAYOUT)
    assert loaded is not None
    assert loaded.version == policy.version
    np.testing.assert_array_equal(loaded.words, policy.words)


def test_a_newer_copy_replaces_the_older_and_leaves_nothing_else(tmp_path: Path, policy: HeldPolicy) -> None:
    save_held(tmp_path / "held.words", policy)
    save_held(tmp_path / "held.words", HeldPolicy.of(8, random_words(2), layout=LAYOUT))
    loaded = load_held(tmp_path / "held.words", LAYOUT)
    assert loaded is not None
    assert loaded.version.number == 8
    assert [path.name for path in tmp_path.iterdir()] == ["held.words"]


def test_without_a_copy_there_is_none(tmp_path: Path) -> None:
    assert load_held(tmp_path / "held.words", LAYOUT) is None


@pytest.mark.parametrize("byte", [0, 9, 20, 40, 50, 5000])
def test_a_flipped_bit_anywhere_makes_it_no_copy(tmp_path: Path, policy: HeldPolicy, byte: int) -> None:
    path = tmp_path / "held.words"
    save_held(path, policy)
    flip_bit(path, byte)
    assert load_held(path, LAYOUT) is None


@pytest.mark.parametrize("size", [0, 3, 40, 1001])
def test_a_truncated_copy_is_no_copy(tmp_path: Path, policy: HeldPolicy, size: int) -> None:
    path = tmp_path / "held.words"
    save_held(path, policy)
    path.write_bytes(path.read_bytes()[:size])
    assert load_held(path, LAYOUT) is None


def test_the_copy_of_another_model_is_no_copy(tmp_path: Path, policy: HeldPolicy) -> None:
    save_held(tmp_path / "held.words", policy)
    other = Layout.of([TensorSpec("a", (LAYOUT.words,))])
    assert load_held(tmp_path / "held.words", other) is None
