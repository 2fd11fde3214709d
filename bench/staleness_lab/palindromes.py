"""A report task: a small language model on reasoning-gym's palindrome_generation, words growing from 4 to 6.

    Now, form a valid palindrome using the following letters: o, z, o        ->    o z o .

Reward 1 for any palindrome of exactly these letters, of which there may be many, as reasoning-gym scores
it; its 0.02 and 0.05 for other words are left out. No published model can be trained for ten seeds, every
method and every staleness within hours on two cores, so a two-layer decoder is pretrained in the run on
the task's own text (a quarter of a minute in each process); all seeds start from it. A token is a word, a
letter or a sign. Of the question it reads the last line; the others are always the same.
"""

import json
import re
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from bench.staleness_lab.answers import END, PAD, AnswerTask, Exercises

_LETTERS: Final = (4, 5, 6)
"""Lengths of a word; reasoning-gym's own curriculum raises them too."""
_NAME: Final = f"palindromes_{_LETTERS[0]}_to_{_LETTERS[-1]}.json"
_TRAINING_A_LENGTH: Final = 2048
_HELD_OUT: Final = 256
_WARM_SCORE: Final = 0.25
_TOKEN: Final = re.compile(r"\w+|\S")

Texts = list[tuple[str, str]]
"""Questions and answers."""


def cache_palindromes(folder: Path) -> None:
    """Write reasoning-gym's questions and answers to ``folder`` unless they are there.

    Raises:
        ModuleNotFoundError: the file is missing, and so is reasoning-gym.
        ValueError: reasoning-gym does not count its own answer as right.
    """
    path = folder / _NAME
    if path.exists():
        return
    import reasoning_gym

    texts: Texts = []
    for letters in _LETTERS:
        dataset = reasoning_gym.create_dataset(
            "palindrome_generation",
            seed=1_000_000 * letters,
            size=_TRAINING_A_LENGTH + (_HELD_OUT if letters == _LETTERS[-1] else 0),
            min_length=letters,
            max_length=letters,
        )
        for entry in dataset:
            if dataset.score_answer(entry["answer"], entry) != 1.0:
                raise ValueError(f"reasoning-gym does not accept its own answer to {entry['question']!r}")
            texts.append((entry["question"].strip().splitlines()[-1], entry["answer"]))
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(texts))


def palindrome_generation(folder: Path) -> AnswerTask:
    """Return the task of the texts cached in ``folder``."""
    return palindrome_task(
        [(question, answer) for question, answer in json.loads((folder / _NAME).read_text())]
    )


def palindrome_task(
    texts: Texts, *, held_out: int = _HELD_OUT, warm_score: float = _WARM_SCORE
) -> AnswerTask:
    """Return a task of questions and answers, of which the last ``held_out`` are for the score."""
    asked = [_TOKEN.findall(question) for question, _ in texts]
    answered = [list(answer) for _, answer in texts]
    words = sorted({word for text in (*asked, *answered) for word in text})
    number = {word: place for place, word in enumerate(words, start=max(END, PAD) + 1)}
    prompt_tokens, answer_tokens = max(map(len, asked)), 1 + max(map(len, answered))
    prompts = [_padded([number[word] for word in text], prompt_tokens) for text in asked]
    answers = [_padded([number[letter] for letter in text] + [END], answer_tokens) for text in answered]
    train, test = (
        Exercises(torch.tensor(prompts[part]), torch.tensor(answers[part]), max(number.values()) + 1)
        for part in (slice(-held_out), slice(-held_out, None))
    )
    return AnswerTask(
        train,
        test,
        width=32,
        heads=4,
        layers=2,
        groups=8,
        warm_score=warm_score,
        warm_batch=256,
        one_start=True,
        shifts=True,
        judge=is_palindrome,
    )


def is_palindrome(token: Tensor, answer: Tensor) -> Tensor:
    """Return where [..., T] reads the same backwards and has the letters of ``answer`` [..., T], bool.

    Source: ``score_answer`` of reasoning-gym's palindrome_generation.
    """
    has_letters = (token.sort(-1).values == answer.sort(-1).values).all(-1)
    places = torch.arange(token.shape[-1]).expand(token.shape)
    letters = (answer != PAD).sum(-1, keepdim=True) - 1  # without the end
    mirrored = torch.where(places < letters, letters - 1 - places, places)
    return has_letters & (token.gather(-1, mirrored.expand(token.shape)) == token).all(-1)


def _padded(tokens: list[int], length: int) -> list[int]:
    return tokens + [PAD] * (length - len(tokens))
