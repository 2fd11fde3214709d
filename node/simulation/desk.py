"""The coordinator of a simulated run: production's decisions on its accounts, without wire and disk.

Samplers that were refused for want of room ask again after production's pause. As long as there is none, the
answer would be the same; so they wait in a ring, in the order in which they ask, until there is room.
"""

from bisect import bisect, insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from node.coordinator.work import decisions, step_history, verdicts
from node.coordinator.work.accounts import Accounts, Balance, RunTerms
from node.coordinator.work.capacity import Bounds
from node.coordinator.work.decisions import EMPTY_PAUSE_S, Decision, room
from node.coordinator.work.group_check import Work
from node.coordinator.work.model_check import Learner
from node.errors import RefusedError
from node.policy import PolicyVersion
from node.rollout import EncodedGroup, GroupHeader, LeaseGrant, PromptLease
from node.run import StepRecord
from node.sampling_parameters import SamplingParameters
from node.serving.heartbeat_pause import pause_s
from node.simulation.events import Events
from node.simulation.profile import Profile
from node.verdict import GroupVerdict, Verdict

_WORK: Final = Work("simulated", "simulated", 8, SamplingParameters(1.0, 1.0, 0, 1024))
_LEARNER: Final = Learner("learner", 1, b"l" * 16, b"t" * 16, 2, version=0, base_root=b"r" * 16)
_PROMPTS: Final = 1 << 30
_EXPIRY_EVERY_S: Final = 1.0

Answer = TypeVar("Answer")


class Desk:
    """Answers samplers and the learner."""

    def __init__(self, profile: Profile, events: Events, *, samplers: int) -> None:
        run = profile.run
        self._pause_s = pause_s(interval_s=EMPTY_PAUSE_S, peers=samplers, lease_ttl_s=run.lease_ttl_s)
        """Until a sampler asks again that was granted nothing."""
        bounds = Bounds(
            run.concurrency_groups,
            run.buffer_groups,
            run.batch_groups,
            run.max_staleness_versions,
            run.buffer_bytes,
        )
        terms = RunTerms(_WORK, bounds, _PROMPTS, 0, run.lease_ttl_s, run.lease_max_s, prompt_retry_s=600.0)
        self.accounts = Accounts(Balance(facts=(_LEARNER,)), terms, now=0.0)
        self.processor_s = 0.0
        self.expired = 0
        self.waits: Counter[str] = Counter()
        """Bounds that cut requests for leases short; empty: none did."""
        self._costs = profile.processor
        self._events = events
        self._ring: list[tuple[float, int, Callable[[], None]]] = []
        """(when within the pause it asks, number, how), sorted."""
        self._entered = 0
        self._is_polling = False
        self._noted_at_s = 0.0
        events.after(_EXPIRY_EVERY_S, self._expire)

    def lease(self, sampler_id: str, wanted: int, held: int) -> LeaseGrant:
        self.processor_s += self._costs.lease_s
        version, now = PolicyVersion(held, _LEARNER.base_root), self._events.now
        grant = self._settle(
            decisions.lease(self.accounts, sampler_id=sampler_id, wanted=wanted, held=version, now=now)
        )
        self.waits[grant.waits_for] += 1
        return (
            grant if grant.leases else replace(grant, retry_after_s=max(grant.retry_after_s, self._pause_s))
        )

    def ask_with_room(self, ask: Callable[[], None]) -> None:
        """Let a sampler that was refused ask again when there is room and its turn comes."""
        self.note_waiting()
        self._entered += 1
        insort(self._ring, (self._events.now % self._pause_s, self._entered, ask))
        self._look_for_room()

    def submit(
        self, lease: PromptLease, sampler_id: str, size_bytes: int, oldest: int, newest: int
    ) -> Verdict | None:
        """Return what becomes of a group; None: the spool is full, send it again later."""
        self.processor_s += self._costs.group_s
        now = self._events.now
        header = GroupHeader(
            run_id=_WORK.run_id, group_id=lease.lease_id, layout_digest=_LEARNER.layout_digest,
            tokenizer_digest=_LEARNER.tokenizer_digest, task=_WORK.task, prompt_index=lease.prompt_index,
            sampling=_WORK.sampling, sampling_started_at_s=now, sampling_finished_at_s=now, graded_at_s=now,
            completions=_WORK.group_size, prompt_tokens=1, longest_completion=1, tokens=_WORK.group_size,
            oldest_version=oldest, newest_version=newest, least_reward=0.0, largest_reward=1.0,
            prompt_digest=lease.prompt_index.to_bytes(16),
        )  # fmt: skip
        encoded = EncodedGroup(b"", bytes(size_bytes), lease.lease_id, sampler_id)
        try:
            return self._settle(
                verdicts.submission(self.accounts, encoded, header, is_published=lambda _: True, now=now)
            ).verdict
        except RefusedError:
            return None

    def renew(self, sampler_id: str, lease_ids: Sequence[str]) -> tuple[str, ...]:
        """Take a heartbeat; return the leases whose work is in vain."""
        self.processor_s += self._costs.heartbeat_s
        return self.accounts.renew(sampler_id, lease_ids, now=self._events.now)

    def judge(self, judged: GroupVerdict) -> None:
        self._settle(verdicts.judgement(self.accounts, judged, now=self._events.now))

    def step(self, record: StepRecord) -> None:
        self._settle(step_history.step(self.accounts, record))

    def note_waiting(self) -> None:
        """Count the requests of those in the ring until now, which were refused unasked."""
        waited_s = len(self._ring) * (self._events.now - self._noted_at_s)
        self.processor_s += waited_s / self._pause_s * self._costs.lease_s
        self._noted_at_s = self._events.now

    def _settle(self, decision: Decision[Answer]) -> Answer:
        self.accounts.apply(decision.transaction, now=self._events.now)
        self._look_for_room()
        return decision.answer

    def _expire(self) -> None:
        self.expired += self._settle(decisions.expiry(self.accounts, self._events.now))
        self._events.after(_EXPIRY_EVERY_S, self._expire)

    def _look_for_room(self) -> None:
        if not self._is_polling and self._ring and room(self.accounts).groups:
            self._is_polling = True
            phase = self._events.now % self._pause_s
            turn = bisect(self._ring, (phase,)) % len(self._ring)
            self._events.after((self._ring[turn][0] - phase) % self._pause_s, self._poll)

    def _poll(self) -> None:
        self._is_polling = False
        if self._ring and room(self.accounts).groups:
            self.note_waiting()
            phase = self._events.now % self._pause_s - 1e-6  # whose turn it is, but for rounding
            *_, ask = self._ring.pop(bisect(self._ring, (phase,)) % len(self._ring))
            ask()
            self._look_for_room()
