"""How words move between the sampler and the workers of its server, frame by frame, through shared memory.

    threads ---read, write---> waiting moves --one call for all of them--> workers

A call costs the server some milliseconds, and it is made between two decode steps: what several threads ask
for meanwhile goes into the next.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np

from node.weights.format.digests import Words
from node.weights.format.layout import Layout
from sampler.engines.remote.frame_memory import Rooms
from sampler.engines.restartable_engine import EngineEndedError
from sampler.engines.vllm.sharded_words import ShardedWords

AskWorkers = Callable[..., object]
"""Calls a method of every worker, with arguments."""


@dataclass(slots=True, eq=False)
class _Move:
    """A frame to be copied, and how that ended."""

    text: str
    is_made: bool = False
    error: EngineEndedError | None = None


class ServerWords(ShardedWords):
    """The live words of a server; for any thread."""

    def __init__(
        self,
        ask_workers: AskWorkers,
        layout: Layout,
        *,
        rooms: Rooms,
        elements: Sequence[Mapping[str, int]],
        before_writing: Callable[[], None],
    ) -> None:
        """Look at the words of all workers; ``before_writing`` is called before each write."""
        super().__init__(self._ask_of, layout, elements=elements)
        self._ask_workers = ask_workers
        self._rooms = rooms
        self._before_writing = before_writing
        self._free: SimpleQueue[int] = SimpleQueue()
        for slot in range(len(rooms)):
            self._free.put(slot)
        self._waiting: list[_Move] = []
        self._is_waiting = threading.Lock()
        self._is_moving = threading.Lock()

    def _ask_of(self, method: str, *arguments: Any) -> list[Words]:
        """See ``sharded_words.Ask``."""
        if method == "settle_words":
            self._ask_workers("settle_frames")
            return []
        frame, *written = arguments
        words = self._layout.frames[frame].words
        slot = self._free.get()
        try:
            if written:
                self._before_writing()
                self._rooms[slot, 0, :words] = written[0]
                self._move(f"write {frame} {slot}")
                return []
            self._move(f"read {frame} {slot}")
            return [np.array(part[:words]) for part in self._rooms[slot]]
        finally:
            self._free.put(slot)

    def _move(self, text: str) -> None:
        """Have a frame copied, together with those that others wait for."""
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
        error: EngineEndedError | None = None
        try:
            self._ask_workers("move_frames", ",".join(move.text for move in moves))
        except EngineEndedError as ended:
            error = ended
        for move in moves:
            move.is_made, move.error = True, error
