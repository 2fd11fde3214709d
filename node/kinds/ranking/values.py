"""Candidates as token ids, and rankings of them as completions: a Plackett-Luce policy.

    prompt      query SEP candidate 0 SEP candidate 1 SEP ... candidate n-1 SEP
    completion  the candidates' numbers, best first, each once: all n, or the first max_new_tokens of them

A model gives a score to each pair ``query SEP candidate``. The action at position k is the candidate ranked
there, and its probability the softmax of the scores over those not ranked before, so that every position has
a logprob as a token has. Neural PG-RANK, arXiv:2310.04407.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from node.errors import Reason, RefusedError, StartupError
from node.values.groups.rollout import RolloutGroup

PAIRED_TOKENS: Final = 1 << 22
"""Most tokens of a ranking: its candidates times the longest, each with the query before it."""


class Pairs(NamedTuple):
    """The candidates of a prompt as a model reads them."""

    input_ids: NDArray[np.int64]
    """[candidates, longest], padded on the right."""
    lengths: NDArray[np.int64]
    """[candidates]"""


def separator_of(config: Mapping[str, Any]) -> int:
    """Return the token between query and candidates: the model's separator, or else its end token.

    Args:
        config: the model's config.json.
    Raises:
        StartupError: it names neither.
    """
    for key in ("sep_token_id", "eos_token_id"):
        found = config.get(key)
        first = found[0] if isinstance(found, list) and found else found
        if isinstance(first, int):
            return first
    raise StartupError(
        "the model's config.json has neither sep_token_id nor eos_token_id",
        fix="Set one of them there: it stands between query and candidates",
    )


def as_text(query: str, candidates: Sequence[str]) -> str:
    """Return query and candidates as the prompt of a task."""
    return json.dumps({"query": query, "candidates": list(candidates)}, ensure_ascii=False)


def read_text(prompt: object) -> tuple[str, list[str]]:
    """Return query and candidates of what ``as_text`` wrote.

    Raises:
        RefusedError: MALFORMED; it is something else.
    """
    try:
        read: Any = json.loads(prompt) if isinstance(prompt, str) else None
        query, candidates = read["query"], read["candidates"]
        if isinstance(candidates, list) and all(isinstance(text, str) for text in (query, *candidates)):
            return query, candidates
    except (ValueError, TypeError, KeyError):
        pass
    raise RefusedError(
        Reason.MALFORMED,
        f"the model ranks, and the prompt {str(prompt)[:100]!r} is not a query with candidates",
        fix="use the task ranking, or return as_text(query, candidates) of node.kinds.ranking.values",
    )


def prompt_of(
    query: Sequence[int], candidates: Sequence[Sequence[int]], *, separator: int
) -> NDArray[np.int32]:
    """Return query and candidates as one prompt.

    Raises:
        RefusedError: MALFORMED; there is no candidate, a text is empty or has the separator in it.
    """
    texts = [query, *candidates]
    if len(texts) < 2 or not all(texts) or any(separator in text for text in texts):
        raise RefusedError(
            Reason.MALFORMED,
            f"{len(candidates)} candidates, {sum(not text for text in texts)} empty texts and "
            f"{sum(separator in text for text in texts)} with the separator {separator} in them; "
            "query and candidates must have tokens, and no separator",
        )
    return np.array([token for text in texts for token in (*text, separator)], np.int32)


def pair_lengths(prompt: NDArray[np.integer], *, separator: int, pair_tokens: int) -> NDArray[np.int64]:
    """Return the length of each pair of query and candidate of a prompt: [candidates].

    Args:
        pair_tokens: longest query and candidate together that the model takes.
    Raises:
        RefusedError: MALFORMED; it is not one of candidates. OVER_LIMIT; a pair is too long for the model, or
            all of them are too many tokens: as a query is repeated, a prompt grows with its square.
    """
    ends = np.flatnonzero(prompt == separator)
    sizes = np.diff(ends, prepend=-1) - 1
    if len(ends) < 2 or ends[-1] != len(prompt) - 1 or not sizes.all():
        raise RefusedError(
            Reason.MALFORMED,
            f"a prompt of {len(prompt)} tokens and {len(ends)} separators is not a query and candidates",
        )
    lengths: NDArray[np.int64] = ends[0] + 1 + sizes[1:]
    if (longest := int(lengths.max())) > pair_tokens:
        raise RefusedError(
            Reason.OVER_LIMIT,
            f"query and candidate have {longest} tokens, the model takes {pair_tokens}",
            fix="shorten or remove such candidates",
        )
    if longest * len(lengths) > PAIRED_TOKENS:
        raise RefusedError(
            Reason.OVER_LIMIT,
            f"{len(lengths)} candidates, each with the query, have {longest * len(lengths)} tokens in all, "
            f"and a ranking takes {PAIRED_TOKENS}",
            fix="shorten the query, or offer fewer candidates",
        )
    return lengths


def pairs_of(
    prompt: NDArray[np.integer], *, separator: int, padding: int, pair_tokens: int = PAIRED_TOKENS
) -> Pairs:
    """Return the pairs of query and candidate of a prompt.

    Args:
        padding: the model's own padding token, by which classifiers find a row's last token.
    Raises:
        RefusedError: as ``pair_lengths``.
    """
    lengths = pair_lengths(prompt, separator=separator, pair_tokens=pair_tokens)
    head = int(np.argmax(prompt == separator)) + 1
    ids = np.full((len(lengths), int(lengths.max())), padding, np.int64)
    ids[:, :head] = prompt[:head]
    start = head
    for row, length in enumerate(lengths.tolist()):
        end = start + length - head
        ids[row, head:length] = prompt[start:end]
        start = end + 1
    return Pairs(ids, lengths)


def joined(pairs: Sequence[Pairs], *, padding: int) -> Pairs:
    """Return the pairs of several prompts, padded to the longest."""
    longest = max(one.input_ids.shape[1] for one in pairs)
    ids = [
        np.pad(one.input_ids, ((0, 0), (0, longest - one.input_ids.shape[1])), constant_values=padding)
        for one in pairs
    ]
    return Pairs(np.concatenate(ids), np.concatenate([one.lengths for one in pairs]))


def ranking_logprob(scores: NDArray[np.floating], order: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return log p of each position of rankings, nats: [..., ranked]; NaN where a score is.

    Args:
        scores: [candidates]
        order: [..., ranked], candidates' numbers, none twice.
    """
    chosen = scores.astype(np.float64)[order]
    is_ranked = (order[..., None] == np.arange(len(scores))).any(axis=-2)
    others = np.where(is_ranked, -np.inf, scores)
    with np.errstate(invalid="ignore"):
        rest = np.logaddexp.reduce(others, axis=-1)
        # Of position k and all after it, from the last one backwards.
        remaining = np.logaddexp.accumulate(
            np.concatenate([rest[..., None], chosen[..., ::-1]], axis=-1), axis=-1
        )[..., :0:-1]
    logprob: NDArray[np.float64] = np.minimum(chosen - remaining, 0.0)
    return logprob


def objection(group: RolloutGroup, *, separator: int, pair_tokens: int) -> str | None:
    """Return why no ranking policy can have made a group; None: one can.

    Args:
        pair_tokens: longest query and candidate together that the model takes.
    """
    try:
        candidates = len(pair_lengths(group.prompt_token_ids, separator=separator, pair_tokens=pair_tokens))
    except RefusedError as refused:
        return refused.what
    ranked = min(candidates, group.sampling.max_new_tokens)
    for number, completion in enumerate(group.completions):
        ids = completion.token_ids
        different, largest = len(np.unique(ids)), int(ids.max())
        if not len(ids) == different == ranked or largest >= candidates:
            return (
                f"completion {number} is not a ranking: {len(ids)} positions, {different} candidates up to "
                f"number {largest}, where {ranked} of {candidates} are to be ranked"
            )
        if completion.is_drawn is not None:
            return f"completion {number} has positions that were not drawn"
    return None
