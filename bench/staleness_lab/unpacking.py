"""A confirming task: a two-layer language model unpacks a word that was packed by counting.

    prompt      c 2 a 1 c 3
    completion  c c a c c c .       every letter as often as it says, then the end

A run of letters must be counted while it is written, and completions are of 3 to 7 tokens. The model is
pretrained in the run on right answers until it gives a quarter of them; all seeds start from it.
"""

from typing import Final

import numpy as np

from bench.staleness_lab.answers import END, HELD_OUT, PAD, TRAINING, AnswerTask

_LETTERS: Final = 12
_FIRST: Final = max(END, PAD) + 1
"""Letters are numbered from here, counts after them."""
_MOST: Final = 3
"""Highest count."""
_FEWEST_PAIRS, _MOST_PAIRS = 2, 3
_LONGEST: Final = 6
"""Letters of an answer."""
_SEED: Final = 45


def word_unpacking() -> AnswerTask:
    """Return the task: 4 words x 8 completions of at most 7 tokens a version."""
    rng = np.random.default_rng(_SEED)
    answers: dict[tuple[int, ...], list[int]] = {}
    while len(answers) < TRAINING + HELD_OUT:
        pairs = rng.integers(_FEWEST_PAIRS, _MOST_PAIRS + 1)
        letters, counts = rng.integers(_LETTERS, size=pairs), rng.integers(1, _MOST + 1, size=pairs)
        if counts.sum() > _LONGEST:
            continue
        packed = np.stack([_FIRST + letters, _FIRST + _LETTERS - 1 + counts], 1).flatten().tolist()
        written = [*(_FIRST + np.repeat(letters, counts)).tolist(), END]
        answers[*_padded(packed, 2 * _MOST_PAIRS)] = _padded(written, _LONGEST + 1)
    return AnswerTask(answers, vocabulary=_FIRST + _LETTERS + _MOST, width=24, heads=2)


def _padded(tokens: list[int], length: int) -> list[int]:
    return tokens + [PAD] * (length - len(tokens))
