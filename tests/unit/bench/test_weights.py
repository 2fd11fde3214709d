"""Every format of the comparison gives the words back, and the figures are those of the deltas."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench.weight_formats import RIVALS, Format, Tensor, bound_bytes
from bench.weight_pairs import Pair, load_pair
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


@pytest.mark.parametrize("step", [1e-8, 3e-6, 1e-3])
@pytest.mark.parametrize("rival", RIVALS, ids=lambda rival: rival.name)
def test_a_rival_gives_the_words_back(rival: Format, step: float) -> None:
    made = pair(step=step)
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


def test_there_is_a_line_for_every_codec_and_ours_is_the_smallest() -> None:
    lines = {line["codec"]: line for line in compare(pair(), only=None, repetitions=1)}
    assert list(lines) == ["ours", "pulse", "gap_xor", "leb128", "dense_xor", "raw", "bound"]
    sizes = {name: line["bytes"] for name, line in lines.items()}
    assert sizes["bound"] < sizes["ours"] < min(sizes[rival.name] for rival in RIVALS)
    assert sizes["raw"] == 6 * pair().changes
    assert lines["ours"]["encode_gb_s_per_core"] > 0


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


def test_a_file_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "pair.npz",
        base=np.zeros(10, np.uint16),
        changed=np.array([1], np.uint32),
        new_values=np.array([1], np.uint16),
        sizes=np.array([4, 5]),
    )
    with pytest.raises(ValueError, match="10 words"):
        load_pair(tmp_path / "pair.npz")
