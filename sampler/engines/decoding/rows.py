"""Requests whose completions are being drawn, each a row of the batch, and whether their caches fit; pure.

Rows are padded to the longest of them, so requests together need rows times columns, with every completion
as long as it may become. What was admitted can always be finished: no row is put off or computed again.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from node.errors import Reason, RefusedError
from node.values.groups.rollout import Completion, Finish
from sampler.engines.engine import GenerationRequest
from sampler.engines.text.stop_strings import StopSearch


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request with what is finished of it, by completion."""

    request: GenerationRequest
    prompt: list[int]
    is_cancelled: bool = False
    done: dict[int, Completion] = field(default_factory=dict)

    def rows(self, decode: Callable[[list[int]], str]) -> "list[Row]":
        """Return a row for each completion."""
        stop = self.request.sampling.stop
        return [
            Row(self, number, StopSearch(decode, stop) if stop else None)
            for number in range(self.request.wanted)
        ]

    def finished(self) -> GenerationRequest | None:
        """Return the request with all completions; None while one is missing."""
        if len(self.done) < self.request.wanted:
            return None
        completions = tuple(self.done[number] for number in range(self.request.wanted))
        return replace(self.request, completions=completions)


@dataclass(slots=True, eq=False)
class Row:
    """One completion. What was drawn becomes known to it later, when it is read back from the device."""

    running: RunningRequest
    number: int
    stop_search: StopSearch | None
    drawn: int = 0
    """How many tokens were drawn, known or not."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept_masses: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def draws_more(self) -> bool:
        """Whether another token is to be drawn, as far as is known."""
        return (
            self.finish is None
            and not self.running.is_cancelled
            and self.drawn < self.running.request.sampling.max_new_tokens
        )

    @property
    def newest(self) -> int:
        """The last token that is known, of the prompt if none was drawn."""
        return (self.token_ids or self.running.prompt)[-1]

    def append(
        self, token: int, logprob: float, kept_mass: float, *, version: int, end_ids: frozenset[int]
    ) -> None:
        """Note a token that was drawn; what was drawn beyond the end of the completion is ignored."""
        if self.finish is not None or self.running.is_cancelled:
            return
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.kept_masses.append(kept_mass)
        self.versions.append(version)
        if token in end_ids:
            self.finish = Finish.END
        elif self.stop_search is not None and self.stop_search.append(token):
            self.finish = Finish.STOP
        elif len(self.token_ids) == self.running.request.sampling.max_new_tokens:
            self.finish = Finish.LENGTH
        if self.finish is not None:
            self.running.done[self.number] = self._completion(self.finish)

    def _completion(self, finish: Finish) -> Completion:
        is_truncated = self.running.request.sampling.is_truncated
        return Completion(
            token_ids=np.array(self.token_ids, np.int32),
            behaviour_logprob=np.array(self.logprobs, np.float32),
            policy_version=np.array(self.versions, np.int32),
            finish=finish,
            kept_mass=np.array(self.kept_masses, np.float32) if is_truncated else None,
        )


def requests_of(rows: Iterable[Row]) -> list[RunningRequest]:
    """Return the requests of ``rows``, each once, in their order."""
    return list({id(row.running): row.running for row in rows}.values())


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """A bound on the caches of running requests."""

    total_bytes: int | None
    """None: no bound."""
    token_bytes: int
    """Size of the cache of one token."""
    spare_columns: int
    """Columns that a cache may have beyond those in use."""

    def share(self, requests: Iterable[RunningRequest]) -> float:
        """Return the share of the memory that ``requests`` need to run at once."""
        return 0.0 if self.total_bytes is None else self._bytes(list(requests)) / self.total_bytes

    def has_room(self, requests: Iterable[RunningRequest]) -> bool:
        """Return whether ``requests`` may all run at once."""
        return self.share(requests) <= 1.0

    def check(self, running: RunningRequest) -> None:
        """Raise a RefusedError (OVER_LIMIT) for a request that never fits."""
        if not self.has_room([running]):
            request = running.request
            raise RefusedError(
                Reason.OVER_LIMIT,
                f"a prompt of {len(running.prompt)} tokens with {request.wanted} completions of up to "
                f"{request.sampling.max_new_tokens} needs {self._bytes([running])} bytes of key-value cache, "
                f"there are {self.total_bytes}",
                fix="raise memory_bytes in sampler.engine_options or lower coordinator.max_new_tokens",
            )

    def _bytes(self, requests: list[RunningRequest]) -> int:
        # One row more for each prompt, which is read once and then repeated.
        rows = sum(r.request.wanted - len(r.done) + 1 for r in requests)
        columns = max((len(r.prompt) + r.request.sampling.max_new_tokens for r in requests), default=0)
        return rows * (columns + self.spare_columns) * self.token_bytes
