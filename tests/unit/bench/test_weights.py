"""Every format of the comparison gives the words back, and the figures are those of the deltas."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from bench.weight_formats import RIVALS, Format, Tensor, bound_bytes
from bench.weight_pairs import Pair, PairError, drawn_pair, load_pair
from bench.weight_results import measured, plot, table
from bench.weights import compare, main
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


@pytest.mark.parametrize("step", [1e-8, 3e-6, 1e-3])
@pytest.mark.parametrize("rival", RIVALS, ids=lambda rival: rival.name)
def test_a_rival_gives_the_words_back(rival: Format, step: float) -> None:
    made = pair(step=step)
    payload = rival.encode(made.words, base=made.base, tensors=made.tensors)
    out = made.base.copy()
    rival.apply(payload, out=out, tensors=made.tensors)
    np.testing.assert_array_equal(out, made.words)


@given(
    shapes=st.lists(st.lists(st.integers(1, 40), max_size=3).map(tuple), min_size=1, max_size=6),
    share=st.sampled_from([0.0, 0.001, 0.1, 1.0]),
    seed=st.integers(0, 1 << 32),
)
@pytest.mark.parametrize("rival", RIVALS, ids=lambda rival: rival.name)
def test_a_rival_gives_any_words_back(
    rival: Format, shapes: list[tuple[int, ...]], share: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    base = random.integers(0, 1 << 16, sum(int(np.prod(shape)) for shape in shapes)).astype(np.uint16)
    words = np.where(random.random(base.size) < share, random.integers(0, 1 << 16, base.size), base)
    names = [f"{number}" for number in range(len(shapes))]
    made = Pair.of("any", base, words.astype(np.uint16), names=names, shapes=shapes)
    payload = rival.encode(made.words, base=made.base, tensors=made.tensors)
    out = made.base.copy()
    rival.apply(payload, out=out, tensors=made.tensors)
    np.testing.assert_array_equal(out, made.words)


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


@pytest.mark.parametrize("told", ["everything", "sizes", "nothing"])
def test_a_file_is_read_whatever_it_tells_of_the_tensors(
    told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = pair()
    made.save(tmp_path / "pair.npz")
    arrays = dict(np.load(tmp_path / "pair.npz"))
    for name in {"everything": [], "sizes": ["names", "shapes"], "nothing": ["names", "sizes", "shapes"]}[
        told
    ]:
        del arrays[name]
    np.savez(tmp_path / "pair.npz", allow_pickle=False, **arrays)
    read = load_pair(tmp_path / "pair.npz")
    np.testing.assert_array_equal(read.words, made.words)
    assert len(read.tensors) == (1 if told == "nothing" else len(SHAPES))
    main(["--pair", str(tmp_path / "pair.npz"), "--only", "ours", "--repetitions", "1"])
    assert json.loads(capsys.readouterr().out)["codec"] == "ours"


GOOD: dict[str, NDArray[Any]] = {
    "base": np.arange(5000, dtype=np.uint16),
    "changed": np.array([7, 3, 4999], np.uint32),
    "new_values": np.array([8, 3, 1], np.uint16),
}


def written(path: Path, **changes: NDArray[Any]) -> Path:
    arrays: dict[str, Any] = GOOD | changes
    np.savez(path, **arrays)
    return path


def test_places_may_come_in_any_order_and_need_not_change(tmp_path: Path) -> None:
    read = load_pair(written(tmp_path / "pair.npz"))
    assert read.changes == 2
    assert (read.words[7], read.words[3], read.words[4999]) == (8, 3, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"changed": np.array([4999, 7, 3], np.uint64)},
        {"changed": np.array([99, 7, 3], np.int8)},
        {"base": GOOD["base"].astype(">u2"), "new_values": GOOD["new_values"].astype(">u2")},
        {"base": GOOD["base"].reshape(50, 100)},
        {"base": GOOD["base"].reshape(50, 100, order="F")},
        {"base": np.uint16(0), "changed": np.array([0]), "new_values": np.ones(1, np.uint16)},
        {"sizes": np.array([5000]), "names": np.array([1])},
        {"sizes": np.array(5000)},
        {"something_else": np.array(["x"])},
    ],
)
def test_an_unusual_file_is_read_by_what_it_means(changes: dict[str, Any], tmp_path: Path) -> None:
    told: dict[str, Any] = GOOD | changes
    read = load_pair(written(tmp_path / "pair.npz", **changes))
    want = np.ravel(told["base"]).astype(np.uint16)
    np.testing.assert_array_equal(read.base, want)
    want[told["changed"]] = told["new_values"]
    np.testing.assert_array_equal(read.words, want)
    assert read.words.dtype == read.base.dtype == np.dtype("=u2")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"base": np.zeros(9, np.float32)}, "base is float32"),
        ({"base": np.zeros(9, np.int16)}, "base is int16"),
        ({"changed": np.ones(5000, np.bool_)}, "changed is bool"),
        ({"sizes": np.array([2**63, 2**63, 5000], np.uint64)}, "sizes add up to 18446744073709556616"),
        ({"names": np.array(["a", "b"])}, "2 different names for 1 sizes"),
        ({"shapes": np.array(["(-50, -100)"])}, "is not a shape"),
        ({"new_values": np.zeros(3, np.uint32)}, "new_values is uint32"),
        ({"changed": np.zeros(3)}, "changed is float64"),
        ({"changed": np.array([1, 2, 5000])}, "base has 5000 words"),
        ({"changed": np.array([-1, 2, 3])}, "changed has -1 to 3"),
        ({"changed": np.array([1, 2, 1])}, "a place twice"),
        ({"changed": np.array([1, 2])}, r"\(2,\) changed, \(3,\) new_values"),
        ({"base": np.zeros(0, np.uint16)}, r"\(0,\) base"),
        ({"sizes": np.array([4, 5])}, "sizes add up to 9"),
        ({"sizes": np.array([0, 5000])}, "not integers above 0"),
        ({"sizes": np.array([1, 4999]), "names": np.array(["a", "a"])}, "1 different names for 2 sizes"),
        ({"shapes": np.array(["(50, 99)"])}, "shapes do not have the sizes"),
        ({"shapes": np.array(["(50"])}, "is not a shape"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(
    changes: dict[str, NDArray[Any]], told: str, tmp_path: Path
) -> None:
    with pytest.raises(PairError, match=told):
        load_pair(written(tmp_path / "pair.npz", **changes))


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04"])
def test_a_file_of_anything_else_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "pair.npz").write_bytes(content)
    with pytest.raises(PairError, match=r"no .npz"):
        load_pair(tmp_path / "pair.npz")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"new_values": np.array([8, 3, 0x7F80], np.uint16)}, "a NaN or an infinity at element 4999"),
        ({"new_values": GOOD["base"][GOOD["changed"]]}, "nothing changed"),
        ({"changed": np.zeros(0, np.uint32), "new_values": np.zeros(0, np.uint16)}, "nothing changed"),
        ({"names": np.array([""])}, "'' is not a valid name of a tensor"),
        ({"names": np.array(["n" * 2000])}, "is not a valid name of a tensor"),
        ({"changed": np.array([1, 2, 1])}, "a place twice"),
    ],
)
def test_what_cannot_be_compared_is_told_in_one_line(
    changes: dict[str, NDArray[Any]], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--pair", str(written(tmp_path / "pair.npz", **changes))])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


@pytest.mark.needs("kernel")
def test_every_implementation_of_ours_gives_a_delta_of_the_same_size() -> None:
    lines = list(compare(pair(), only=["ours"], repetitions=1, implementations=["best", "portable", "numpy"]))
    assert [line["implementation"] for line in lines][1:] == ["C, portable", "numpy"]
    assert len({line["bytes"] for line in lines}) == 1


def test_a_drawn_pair_changes_as_a_trained_one() -> None:
    drawn = drawn_pair(100_000, step=3e-7)
    small = (drawn.base & 0x7FFF) < 0x3B00
    changed = drawn.base != drawn.words
    assert 0.001 < changed.mean() < 0.05
    assert changed[small].mean() > 4 * changed[~small].mean()


def test_the_record_is_made_into_a_table_and_a_plot(lines: list[dict[str, Any]], tmp_path: Path) -> None:
    lines = [*lines, measured("--drawn", "5000", "--only", "ours", "--repetitions", "1")]
    made = table(lines)
    assert f"A core copies {np.median([line['copy_gb_s_per_core'] for line in lines[:-1]]):.2f} GB/s" in made
    assert f"| {lines[1]['encode_of_copy']:.2f} ({lines[1]['encode_of_copy']:.2f}) |" in made
    assert f"| pulse | {lines[1]['bytes']:,} |" in made
    assert "| 5,000 |" in made
    plot(tmp_path / "ratio.png", lines)
    assert (tmp_path / "ratio.png").read_bytes().startswith(b"\x89PNG")
