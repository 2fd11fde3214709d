"""A sampler that hands in other tokens than it drew, under the version that it was asked for.

    random tokens   drawn uniformly, with the logprobs of what the policy drew in their place
    replay          what this sampler drew for the same prompt before, with the logprobs of that time
    copies          what a sampler in league with it drew for the same prompt; they share a directory

The task grades what is handed in, so that the rewards are honest.
"""

import pickle
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from node.values.groups.rollout import Completion, Finish

Completions = tuple[Completion, ...]
Draw = Callable[[NDArray[np.int32], Completions], Completions]
"""Prompt and completions as drawn to the completions that are handed in; the same object: nothing changed."""


def random_tokens(vocabulary: int, end_ids: Collection[int], *, seed: int) -> Draw:
    """Replace every token but the one that ended a completion."""
    random = np.random.default_rng(seed)
    ids = np.array([token for token in range(vocabulary) if token not in end_ids], np.int32)

    def draw(_: NDArray[np.int32], completions: Completions) -> Completions:
        return tuple(_with_tokens(one, random.choice(ids, len(one.token_ids))) for one in completions)

    return draw


def replayed() -> Draw:
    """Hand in the first completions of each prompt again."""
    first: dict[bytes, Completions] = {}

    def draw(prompt: NDArray[np.int32], completions: Completions) -> Completions:
        known = first.setdefault(prompt.tobytes(), completions)
        return completions if known is completions else _under_version_of(completions, known)

    return draw


def copied(shared: Path, *, name: str) -> Draw:
    """Put the first completions of each prompt into ``shared``; hand in another's where there are some."""

    def draw(prompt: NDArray[np.int32], completions: Completions) -> Completions:
        of_prompt = "-".join(map(str, prompt.tolist()))
        own = shared / f"{of_prompt}.{name}"
        if not own.exists():
            written = shared / f".{own.name}"
            written.write_bytes(pickle.dumps(completions))
            written.replace(own)
        others = sorted(path for path in shared.glob(f"{of_prompt}.*") if path != own)
        return _under_version_of(completions, pickle.loads(others[0].read_bytes())) if others else completions

    return draw


def _with_tokens(one: Completion, token_ids: NDArray[np.int32]) -> Completion:
    if one.finish is Finish.END:
        token_ids[-1] = one.token_ids[-1]
    return replace(one, token_ids=token_ids)


def _under_version_of(drawn: Completions, completions: Completions) -> Completions:
    version = max(int(one.policy_version.max()) for one in drawn)
    return tuple(
        replace(one, policy_version=np.full(len(one.token_ids), version, np.int32)) for one in completions
    )
