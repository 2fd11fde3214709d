"""The live words of an engine in other processes, frame by frame through memory that all of them map.

    threads ---read, write---> waiting moves --one call for all of them--> every process that has words

    write   every process takes of the frame what is its own
    read    every process returns the frame, zero where it has nothing; together they are the frame

A call costs some milliseconds, and may be made between two decode steps only: what several threads ask for
meanwhile goes into the next. A word that several processes hold must be the same in all of them. Where it is
not, another one is read, which no digest matches.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np

from node.errors import StartupError
from node.weights.format.digests import Words
from node.weights.format.layout import FrameSpan, Layout
from sampler.engines.words.frame_memory import Rooms
from sampler.engines.words.model_words import ModelWords


def move_frames(moves: str, words: ModelWords, layout: Layout, rooms: Rooms, *, worker: int) -> None:
    """Copy frames between the words of this process and the shared memory.

    Args:
        moves: ``read FRAME SLOT`` or ``write FRAME SLOT``, separated by commas.
    """
    for move in moves.split(","):
        call, frame, slot = move.split(" ")
        span, room = layout.frames[int(frame)], rooms[int(slot)]
        if call == "write":
            words.write(span, room[0, : span.words])
        else:
            room[worker, : span.words] = words.read(span)


@dataclass(slots=True, eq=False)
class _Move:
    """A frame to be copied, and how that ended."""

    text: str
    is_made: bool = False
    error: Exception | None = None


class SharedWords:
    """See ``LiveWords`` and ``ModelWords``: there are no others. For any thread."""

    spares = None

    def __init__(
        self,
        layout: Layout,
        rooms: Rooms,
        *,
        move: Callable[[str], object],
        settle: Callable[[], object],
        elements: Sequence[Mapping[str, int]] = (),
        before_writing: Callable[[], None] = lambda: None,
    ) -> None:
        """Look at the words of all processes.

        Args:
            move: Has every process do ``move_frames``; raises an error where one does not.
            settle: Has every process compute with what was written.
            elements: How many elements of each tensor each process has, where there are several.
        Raises:
            StartupError: a tensor is neither whole in every process nor split among them.
        """
        self._layout = layout
        self._numbers = {frame.start_word: number for number, frame in enumerate(layout.frames)}
        self._rooms = rooms
        self._ask_to_move = move
        self._ask_to_settle = settle
        self._before_writing = before_writing
        self._replicated = set()
        for span in layout.tensors if len(elements) > 1 else ():
            held = [worker[span.name] for worker in elements]
            if all(count == span.elements for count in held):
                self._replicated.add(span.name)
            elif sum(held) != span.elements:
                raise StartupError(
                    f"vLLM splits tensor {span.name!r} of {span.elements} elements into {held}",
                    fix="Lower tensor_parallel in sampler.engine_options, at most to the key-value heads.",
                )
        self._free: SimpleQueue[int] = SimpleQueue()
        for slot in range(len(rooms)):
            self._free.put(slot)
        self._waiting: list[_Move] = []
        self._is_waiting = threading.Lock()
        self._is_moving = threading.Lock()

    @property
    def live(self) -> "SharedWords":
        return self

    def settle(self) -> None:
        self._ask_to_settle()

    def read(self, frame: FrameSpan) -> Words:
        number = self._numbers[frame.start_word]
        with self._slot() as slot:
            self._move(f"read {number} {slot}")
            held = self._rooms[slot, :, : frame.words]
            words: Words = np.bitwise_or.reduce(held)
            for overlap in self._layout.overlaps(number) if self._replicated else ():
                if overlap.tensor.name in self._replicated:
                    place = slice(overlap.frame_word, overlap.frame_word + overlap.words)
                    agreed = np.bitwise_and.reduce(held[:, place])
                    words[place] = np.where(agreed == words[place], agreed, ~agreed)
        return words

    def write(self, frame: FrameSpan, words: Words) -> None:
        with self._slot() as slot:
            self._before_writing()
            self._rooms[slot, 0, : frame.words] = words
            self._move(f"write {self._numbers[frame.start_word]} {slot}")

    def memory(self, frame: FrameSpan) -> Words | None:
        return None

    @contextmanager
    def _slot(self) -> Iterator[int]:
        slot = self._free.get()
        try:
            yield slot
        finally:
            self._free.put(slot)

    def _move(self, text: str) -> None:
        """Copy a frame, together with those that other threads wait for."""
        move = _Move(text)
        with self._is_waiting:
            self._waiting.append(move)
        with self._is_moving:
            if not move.is_made:
                self._move_all()
        if move.error is not None:
            raise move.error

    def _move_all(self) -> None:
        with self._is_waiting:
            moves, self._waiting = self._waiting, []
        error: Exception | None = None
        try:
            self._ask_to_move(",".join(move.text for move in moves))
        except Exception as failed:  # of any kind: each thread whose frame was asked for gets it
            error = failed
        for move in moves:
            move.is_made, move.error = True, error
