"""The live words where several devices share the model: each has a part of most tensors, and all of some.

    write   the whole frame goes to every worker, which takes what is its own
    read    every worker returns the frame, zero where it has nothing; together they are the frame

A word that several devices hold must be the same on all of them. Where it is not, another one is read, which
no digest matches.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from node.errors import StartupError
from node.weights.format.digests import Words
from node.weights.format.layout import FrameSpan, Layout

Ask = Callable[..., list[Any]]
"""Calls a method of every worker, with arguments; returns what each returned."""


class ShardedWords:
    """See ``LiveWords`` and ``ModelWords``: there are no others."""

    spares = None

    def __init__(self, ask: Ask, layout: Layout, *, elements: Sequence[Mapping[str, int]]) -> None:
        """Look at the words of all workers.

        Args:
            elements: How many elements of each tensor each worker has.
        Raises:
            StartupError: a tensor is neither whole on every device nor split among them.
        """
        self._ask = ask
        self._layout = layout
        self._numbers = {frame.start_word: number for number, frame in enumerate(layout.frames)}
        self._replicated = set()
        for span in layout.tensors:
            held = [worker[span.name] for worker in elements]
            if all(count == span.elements for count in held):
                self._replicated.add(span.name)
            elif sum(held) != span.elements:
                raise StartupError(
                    f"vLLM splits tensor {span.name!r} of {span.elements} elements into {held}",
                    fix="Lower tensor_parallel in sampler.engine_options, at most to the key-value heads.",
                )

    @property
    def live(self) -> "ShardedWords":
        return self

    def settle(self) -> None:
        self._ask("settle_words")

    def read(self, frame: FrameSpan) -> Words:
        number = self._numbers[frame.start_word]
        held: list[Words] = self._ask("read_words", number)
        words: Words = np.bitwise_or.reduce(held)
        for overlap in self._layout.overlaps(number):
            if overlap.tensor.name in self._replicated:
                place = slice(overlap.frame_word, overlap.frame_word + overlap.words)
                agreed = np.bitwise_and.reduce([part[place] for part in held])
                words[place] = np.where(agreed == words[place], agreed, ~agreed)
        return words

    def write(self, frame: FrameSpan, words: Words) -> None:
        self._ask("write_words", self._numbers[frame.start_word], words)

    def memory(self, frame: FrameSpan) -> Words | None:
        return None
