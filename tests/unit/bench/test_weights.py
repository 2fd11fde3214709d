"""Every format of the comparison gives the words back, and the figures are those of the deltas."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from bench.weights.__main__ import compare, main
from bench.weights.formats import RIVALS, Format, Tensor, bound_bytes
from bench.weights.pairs import Pair, PairError, load_pair
from support.exponent_conditioned import trained_step, trained_words

SHAPES = [(300, 200), (64,), (70_000,), (128, 512), ()]
NAMES = ["z.weight", "norm", "flat", "b.weight", "scale"]


def pair(*, step: float = 3e-6) -> Pair:
    size = sum(int(np.prod(shape)) for shape in SHAPES)
    base = trained_words(size, seed=1)
    words = trained_step(base, seed=2, step=step)
    words[-1] ^= 1
    return Pair.of("made", base, words, names=NAMES, shapes=SHAPES)


@pytest.fixture(scope="module")
def lines() -> list[dict[str, Any]]:
    """Return the line of every codec."""
    return list(compare(pair(), only=None, repetitions=1))


def words_from(rival: Format, made: Pair) -> NDArray[np.uint16]:
    """Return the words of a pair as a format gives them back."""
    payload = rival.encode(made.words, base=made.base, tensors=made.tensors)
    out = made.base.copy()
    rival.apply(payload, out=out, tensors=made.tensors)
    return out


@pytest.mark.parametrize("rival", RIVALS, ids=lambda rival: rival.name)
def test_a_rival_gives_the_words_of_a_step_back(rival: Format) -> None:
    for step in (1e-8, 1e-3):
        made = pair(step=step)
        np.testing.assert_array_equal(words_from(rival, made), made.words)


@given(
    shapes=st.lists(st.lists(st.integers(1, 40), max_size=3).map(tuple), min_size=1, max_size=6),
    share=st.sampled_from([0.0, 0.001, 0.1, 1.0]),
    seed=st.integers(0, 1 << 32),
)
def test_every_rival_gives_any_words_back(shapes: list[tuple[int, ...]], share: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    base = random.integers(0, 1 << 16, sum(int(np.prod(shape)) for shape in shapes)).astype(np.uint16)
    words = np.where(random.random(base.size) < share, random.integers(0, 1 << 16, base.size), base)
    names = [f"{number}" for number in range(len(shapes))]
    made = Pair.of("any", base, words.astype(np.uint16), names=names, shapes=shapes)
    for rival in RIVALS:
        np.testing.assert_array_equal(words_from(rival, made), made.words)


def test_the_bound_is_the_one_worked_by_hand() -> None:
    base = np.array([0x3C00] * 8 + [0x3C80] * 4, np.uint16)
    words = base.copy()
    words[[0, 1]] += np.array([1, 2], np.uint16)
    words[8] += np.uint16(1)
    # 8 words of which 2 change, by 1 and by 2: 8 H(1/4) + 2 bits. 4 of which 1 changes: 4 H(1/4) bits.
    entropy = 2 - 0.75 * np.log2(3)
    bound = bound_bytes(words, base=base, tensors=[Tensor("t", 0, (12,))])
    assert 8 * bound == pytest.approx(12 * entropy + 2)


def test_there_is_a_line_for_every_codec_and_ours_is_the_smallest(lines: list[dict[str, Any]]) -> None:
    of = {line["codec"]: line for line in lines}
    assert list(of) == ["ours", "pulse", "gap_xor", "leb128", "dense_xor", "raw", "bound"]
    sizes = {name: line["bytes"] for name, line in of.items()}
    assert sizes["bound"] < sizes["ours"] < min(sizes[rival.name] for rival in RIVALS)
    assert sizes["raw"] == 6 * pair().changes
    assert of["ours"]["encode_gb_s_per_core"] > 0


def test_tensors_are_brought_into_the_canonical_order() -> None:
    made = pair()
    assert [tensor.name for tensor in made.tensors] == sorted(NAMES)
    flat = made.tensors[1]
    start = 300 * 200 + 64
    np.testing.assert_array_equal(
        made.base[flat.slice], trained_words(made.base.size, seed=1)[start:][:70_000]
    )


def test_a_pair_is_read_as_it_was_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, path = pair(), tmp_path / "pair.npz"
    made.save(path)
    read = load_pair(path)
    np.testing.assert_array_equal(read.words, made.words)
    assert read.tensors == made.tensors
    main(["--pair", str(path), "--only", "ours", "--repetitions", "1"])
    assert json.loads(capsys.readouterr().out)["codec"] == "ours"


KEPT: dict[str, NDArray[Any]] = {
    "base": np.arange(6, dtype=np.uint16),
    "words": np.array([0, 1, 2, 3, 4, 9], np.uint16),
    "names": np.array(["a", "b"]),
    "shapes": np.array("[[2, 2], [2]]"),
}


@pytest.mark.parametrize(
    "changes",
    [
        {"base": np.zeros(6, np.float32)},
        {"words": np.zeros(5, np.uint16)},
        {"shapes": np.array("[[2, 2]]")},
        {"shapes": np.array("[[6]]")},
        {"shapes": np.array("nothing")},
        {"words": KEPT["base"]},
        {"words": np.array([0, 1, 2, 3, 4, 0x7F80], np.uint16)},
    ],
)
def test_what_cannot_be_compared_is_told_in_one_line(
    changes: dict[str, NDArray[Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arrays: dict[str, Any] = KEPT | changes
    np.savez(tmp_path / "pair.npz", **arrays)
    with pytest.raises(SystemExit) as stopped:
        main(["--pair", str(tmp_path / "pair.npz")])
    assert stopped.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04"])
def test_a_file_of_anything_else_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "pair.npz").write_bytes(content)
    with pytest.raises(PairError):
        load_pair(tmp_path / "pair.npz")


@pytest.mark.needs("kernel")
def test_every_implementation_of_ours_gives_a_delta_of_the_same_size() -> None:
    lines = list(compare(pair(), only=["ours"], repetitions=1, implementations=["best", "portable", "numpy"]))
    assert [line["implementation"] for line in lines][1:] == ["C, portable", "numpy"]
    assert len({line["bytes"] for line in lines}) == 1
