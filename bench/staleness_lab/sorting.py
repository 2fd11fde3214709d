"""A report task: a two-layer language model writes the letters of a word in the order of the alphabet.

    prompt      d a c a _ _
    completion  a a c d . _ _       the letters in order, then the end

It is pretrained in the run on right answers until it gives a quarter of them; all seeds start from it.
"""

from typing import Final

import numpy as np

from bench.staleness_lab.answers import END, HELD_OUT, PAD, TRAINING, AnswerTask

_LETTERS: Final = 10
_FIRST: Final = max(END, PAD) + 1
"""Letters are numbered from here."""
_SHORTEST, _LONGEST = 4, 6
_SEED: Final = 25


def word_sorting() -> AnswerTask:
    """Return the task: 4 words x 8 completions of at most 7 tokens a version."""
    rng = np.random.default_rng(_SEED)
    answers: dict[tuple[int, ...], list[int]] = {}
    while len(answers) < TRAINING + HELD_OUT:
        letters = (_FIRST + rng.integers(_LETTERS, size=rng.integers(_SHORTEST, _LONGEST + 1))).tolist()
        padding = [PAD] * (_LONGEST - len(letters))
        answers[*letters, *padding] = [*sorted(letters), END, *padding]
    return AnswerTask(answers, vocabulary=_FIRST + _LETTERS, width=32, heads=4)
