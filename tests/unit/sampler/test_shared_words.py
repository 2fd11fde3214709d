"""Words in parameters that are rectangles of tensors, as on several devices, against one flat array."""

import threading

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.weights.format.layout import FrameSpan, Layout, TensorSpec
from sampler.engines.vllm.shards import ParameterWords, Shard
from sampler.engines.words.shared_words import SharedWords, move_frames
from support.refusals import cannot_start

DEVICES = 2
SPLITS = {
    "rows.weight": (6, 5),
    "columns.weight": (3, 8),
    "vector.bias": (4,),
    "whole.weight": (7,),
    "experts.gate_up_proj": (3, 4, 5),
}


def layout(frame_words: int) -> Layout:
    specs = [TensorSpec(name, shape) for name, shape in SPLITS.items()]
    return Layout.of([*specs, TensorSpec("exact.weight", (2, 4), "float32")], frame_words=frame_words)


def shards(device: int, dtype: torch.dtype) -> dict[str, Shard]:
    """Return what one of two devices has, filled with what no version holds."""

    def shard(
        rows: int, columns: int, *, row: int = 0, column: int = 0, of: int = 0, as_: torch.dtype = dtype
    ) -> Shard:
        return Shard(torch.full((rows, columns), torch.nan, dtype=as_), row, column, of or columns)

    return {
        "rows.weight": shard(3, 5, row=3 * device),
        "columns.weight": shard(3, 4, column=4 * device, of=8),
        "vector.bias": shard(2, 1, row=2 * device),
        "whole.weight": shard(7, 1),
        # Each of three experts has two rows of gate and two of up; a device has one of either.
        "experts.gate_up_proj": shard(6, 5, column=5 * device, of=10),
        "exact.weight": shard(2, 2, column=2 * device, of=4, as_=torch.float32),
    }


class Devices:
    """Two devices' words, asked as vLLM's workers are, through memory that they share."""

    def __init__(self, of: Layout, dtype: torch.dtype) -> None:
        self.layout = of
        self.held = [ParameterWords(shards(device, dtype), of) for device in range(DEVICES)]
        self.rooms = np.full((2, DEVICES, max(frame.words for frame in of.frames)), 7, np.uint16)
        elements = [
            {name: shard.values.numel() for name, shard in shards(device, torch.float32).items()}
            for device in range(DEVICES)
        ]
        self.words = SharedWords(of, self.rooms, move=self._move, settle=lambda: None, elements=elements)

    def _move(self, moves: str) -> None:
        for worker, held in enumerate(self.held):
            move_frames(moves, held, self.layout, self.rooms, worker=worker)


@given(frame_words=st.integers(2, 60), seed=st.integers(0, 99), wide=st.booleans())
def test_words_written_to_all_devices_are_read_back_from_them_together(
    frame_words: int, seed: int, wide: bool
) -> None:
    devices = Devices(layout(frame_words), torch.float32 if wide else torch.bfloat16)
    version = np.random.default_rng(seed).integers(0, 1 << 16, devices.layout.words, np.uint16)
    for frame in devices.layout.frames:
        devices.words.write(frame, version[frame.slice])
    for frame in devices.layout.frames:
        np.testing.assert_array_equal(devices.words.read(frame), version[frame.slice])


def test_a_word_that_devices_hold_differently_is_read_as_neither() -> None:
    devices = Devices(layout(64), torch.bfloat16)
    words = devices.words
    for frame in devices.layout.frames:
        words.write(frame, np.ones(frame.words, np.uint16))
    for number, frame in enumerate(devices.layout.frames):
        damaged = np.ones(frame.words, np.uint16)
        for overlap in devices.layout.overlaps(number):
            if overlap.tensor.name == "whole.weight":
                damaged[overlap.frame_word] = 0
                devices.held[1].write(frame, damaged)
                assert words.read(frame)[overlap.frame_word] not in (0, 1)
                assert (np.delete(words.read(frame), overlap.frame_word) == 1).all()


def test_a_tensor_that_no_devices_have_together_is_refused() -> None:
    whole = layout(64)
    elements = [{span.name: span.elements for span in whole.tensors} for _ in range(DEVICES)]
    elements[0]["rows.weight"] = 15
    rooms = np.zeros((1, DEVICES, 64), np.uint16)
    with cannot_start("'rows.weight'", "30", "[15, 30]"):
        SharedWords(whole, rooms, move=lambda moves: None, settle=lambda: None, elements=elements)


def test_every_thread_whose_frame_was_not_moved_gets_the_error() -> None:
    whole = layout(8)
    begun, go_on = threading.Semaphore(0), threading.Event()

    def fail(moves: str) -> None:
        begun.release()
        assert go_on.wait(10)
        raise RuntimeError(moves)

    rooms = np.zeros((8, 1, 8), np.uint16)
    words = SharedWords(whole, rooms, move=fail, settle=lambda: None)
    errors = []

    def read(frame: FrameSpan) -> None:
        try:
            words.read(frame)
        except RuntimeError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=read, args=(frame,)) for frame in whole.frames[:4]]
    for thread in threads:
        thread.start()
    assert begun.acquire(timeout=10)
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert len(errors) == 4
