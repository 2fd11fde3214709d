"""Masters to words, a frame at a time."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.held_policy import HeldPolicy
from learner.masters.master_words import MasterWords, root_of
from node.weights.assembly.public_base import PublicBase
from node.weights.format.digests import Words
from node.weights.format.layout import Layout, TensorSpec
from support.refusals import naming

SHAPES = {"a": (7,), "b": (300, 301), "c": (), "d": (3, 2)}
LAYOUT = Layout.of([TensorSpec(name, shape) for name, shape in SHAPES.items()], frame_words=40_000)


def make_masters() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}


def words_by_tensor(tensors: dict[str, torch.Tensor]) -> Words:
    flat = torch.cat([tensors[name].reshape(-1) for name in sorted(tensors)]).bfloat16()
    words: Words = flat.view(torch.uint16).numpy()
    return words


def test_frames_put_together_are_the_rounded_tensors_in_order() -> None:
    masters = make_masters()
    reader, words = MasterWords(masters, LAYOUT), np.empty(LAYOUT.words, np.uint16)
    assert len(LAYOUT.frames) > 2
    for number, frame in reversed(list(enumerate(LAYOUT.frames))):
        reader.read(number, words[frame.slice])
    assert (words == words_by_tensor(masters)).all()


def test_reading_yields_the_masters_as_they_are_now() -> None:
    masters = make_masters()
    reader, word = MasterWords(masters, LAYOUT), np.empty(LAYOUT.frames[0].words, np.uint16)
    for value, bits in ((1.0, 0x3F80), (-2.0, 0xC000)):
        masters["a"].fill_(value)
        reader.read(0, word)
        assert word[0] == bits


def test_denormals_and_signed_zeros_are_kept() -> None:
    bits = np.array([0x00000000, 0x80000000, 0x00010000, 0x807F0000, 0x00008001, 0x00018000, 0x00008000])
    masters = {**make_masters(), "a": torch.from_numpy(bits.astype(np.uint32).view(np.float32))}
    words = np.empty(LAYOUT.frames[0].words, np.uint16)
    MasterWords(masters, LAYOUT).read(0, words)
    # The last three are rounded: up, to even (up), to even (down).
    assert words[:7].tolist() == [0, 0x8000, 1, 0x807F, 1, 2, 0]


def test_a_thread_that_reads_starts_no_threads_of_torch() -> None:
    reader, words = MasterWords(make_masters(), LAYOUT), np.empty(70_000, np.uint16)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    seen: list[int] = []

    def read() -> None:
        reader.read(1, words)
        seen.append(native_threads())

    try:
        thread = threading.Thread(target=read)
        threads = native_threads()
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(before)
    assert seen == [threads + 1]


def native_threads() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("Threads:"))


def test_masters_that_do_not_lie_in_order_are_our_own_mistake() -> None:
    with naming(ValueError, "'b'"):
        MasterWords({**make_masters(), "b": torch.zeros(301, 300).T}, LAYOUT)


def test_the_public_base_on_disk_is_the_whole_version(tmp_path: Path) -> None:
    masters = make_masters()
    words = MasterWords(masters, LAYOUT)
    base = PublicBase.keep(tmp_path / "base.words", words.digests(), words.copy_frames, layout=LAYOUT)
    assert (np.asarray(base.words) == words_by_tensor(masters)).all()
    assert base.version == HeldPolicy.of(0, np.asarray(base.words), layout=LAYOUT).version
    assert base.model.root == base.version.root == root_of(words)


@pytest.mark.parametrize("frame_words", [4, 16, 1 << 20])
def test_tensors_of_every_dtype_are_rounded_to_it_and_half_a_word_left_over_is_zero(frame_words: int) -> None:
    random = torch.Generator().manual_seed(2)
    published = {
        name: torch.randn(shape, generator=random).mul(8).to(getattr(torch, dtype))
        for name, (dtype, shape) in {
            "a": ("float32", (3, 3)),
            "b": ("bfloat16", (7,)),
            "c": ("float8_e4m3fn", (5,)),
            "d": ("int64", (3,)),
            "e": ("uint8", (1,)),
            "f": ("bool", (9,)),
            "g": ("float16", ()),
            "h": ("float8_e5m2", (2, 4)),
        }.items()
    }
    masters = {n: t.float() if t.is_floating_point() else t for n, t in published.items()}
    layout = Layout.of(
        [TensorSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in published.items()],
        frame_words=frame_words,
    )
    reader, words = MasterWords(masters, layout), np.full(layout.words, 0xFFFF, np.uint16)
    for number, frame in enumerate(layout.frames):
        reader.read(number, words[frame.slice])
    for span in layout.tensors:
        told = words[span.start_word :][: span.words].tobytes()
        expected = published[span.name].reshape(-1).view(torch.uint8).numpy().tobytes()
        assert told == expected + bytes(len(told) - len(expected))
