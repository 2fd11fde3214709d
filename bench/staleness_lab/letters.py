"""A design task: write a word of 3 to 6 letters backwards."""

from typing import Final

import numpy as np
import torch

from bench.staleness_lab.answers import END, PAD, AnswerTask, Exercises

_LETTERS: Final = 8
_FIRST: Final = 2
"""Letters are numbered after ``END`` and ``PAD``."""
_SHORTEST, _LONGEST = 3, 6
_TRAINING: Final = 4096
_HELD_OUT: Final = 128
_SEED: Final = 20250817


def word_reversal() -> AnswerTask:
    """Return the task: one layer, 4 words x 8 completions of at most 7 tokens a version."""
    rng = np.random.default_rng(_SEED)
    answers: dict[tuple[int, ...], list[int]] = {}
    while len(answers) < _TRAINING + _HELD_OUT:
        length = rng.integers(_SHORTEST, _LONGEST + 1)
        letters = (_FIRST + rng.integers(_LETTERS, size=length)).tolist()
        padding = [PAD] * (_LONGEST - len(letters))
        answers[*letters, *padding] = [*reversed(letters), END, *padding]
    words, reversed_words = torch.tensor(list(answers)), torch.tensor(list(answers.values()))
    train, held_out = (
        Exercises(words[part], reversed_words[part], _FIRST + _LETTERS)
        for part in (slice(_TRAINING), slice(_TRAINING, None))
    )
    return AnswerTask(train, held_out, width=24, heads=1, layers=1, groups=4, warm_score=0.15)
