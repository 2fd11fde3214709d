"""A sampler's policy sync beside the body of a test, with live words and no model around them."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from bench.held_policy import HeldPolicy
from node.errors import Reason
from node.system.clock import SystemClock
from node.telemetry.metrics import NodeMetrics
from node.values.groups.rollout import LeaseGrant
from node.values.policy import PolicyVersion
from node.weights.format.digests import Words
from node.weights.format.layout import Layout
from node.weights.transfer.sources import Source
from sampler.engines.engine_thread import Change
from sampler.engines.words.torch_words import LiveTensors
from sampler.metrics import SamplerMetrics
from sampler.served_policy import ServedPolicy
from sampler.versions.held_version import HeldVersion
from sampler.versions.policy_sync import PolicySync
from sampler.versions.saved_policy import SavedPolicy
from support.model_words import live_words, words_of
from support.policy_hub import PolicyHub, Registry, make_fetcher, make_sources
from support.waiting import until

IN_PLACE = "in place"
"""The name of a state directory whose sampler writes versions over the live one."""


IN_A_SPARE_COPY = "in a spare copy"

both_ways = pytest.mark.parametrize("state_dir", [IN_A_SPARE_COPY, IN_PLACE], indirect=True)
"""For what depends on how versions are applied."""


@pytest.fixture
def state_dir(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Return the directory of a sampler; its name says how versions are applied."""
    directory = tmp_path / getattr(request, "param", IN_A_SPARE_COPY)
    directory.mkdir()
    return directory


class CountedRefusals(NodeMetrics):
    """Counts refusals for the test."""

    def __init__(self, registry: CollectorRegistry, refusals: Counter[Reason]) -> None:
        super().__init__(registry, roles=(), clock=SystemClock())
        self._counted = refusals

    def count_refusal(self, *, service: str, reason: Reason) -> None:
        self._counted[reason] += 1


class Serving:
    """The versions an engine was given, in order, with copies of their words as they were then."""

    def __init__(self, weights: LiveTensors, layout: Layout) -> None:
        self.versions: list[PolicyVersion] = []
        self.words: dict[int, Words] = {}
        self.is_taking = asyncio.Event()
        self.is_taking.set()
        self.refusals: Counter[Reason] = Counter()
        self.registry = Registry()
        self.offers = 0
        self.weights = weights
        self.layout = layout
        self.sync: PolicySync
        self.generating: set[int] = set()
        """Versions with held-out prompts that are not generated."""
        self.policy = ServedPolicy(is_generating=self.generating.__contains__)
        self.policy.answered(0, LeaseGrant((), 0.0, ""), had_to_ask=False, now=0.0)

    async def hand_over(self, change: Change) -> PolicyVersion | None:
        self.offers += 1
        await self.is_taking.wait()
        version = await asyncio.to_thread(change)
        if version is not None:
            self.versions.append(version)
            self.words[version.number] = words_of(self.weights.live, layout=self.layout)
        return version

    def spoil(self, *frames: int) -> None:
        """Flip one bit of each of these frames in memory."""
        for frame in frames:
            words = self.weights.live.read(self.layout.frames[frame]).copy()
            words[0] ^= 1
            self.weights.live.write(self.layout.frames[frame], words)

    @property
    def numbers(self) -> list[int]:
        return [version.number for version in self.versions]

    async def reaches(self, version: HeldPolicy) -> None:
        await until(lambda: bool(self.versions) and self.versions[-1] == version.version)
        np.testing.assert_array_equal(self.words[version.version.number], version.words)


@asynccontextmanager
async def syncing(
    hub: PolicyHub,
    state_dir: Path,
    *,
    others: tuple[PolicyHub, ...] = (),
    sources: tuple[Source, ...] | None = None,
    words0: Words | None = None,
    save_every_s: float = 0.0,
) -> AsyncIterator[Serving]:
    """Run a policy sync beside the body; where it fails, the body ends with it.

    Args:
        hub: whose versions it follows.
        state_dir: its name says how versions are applied.
        others: sources beside ``hub``.
        sources: instead of ``hub`` itself, ways to it.
        words0: the base model, if not the learner's.
        save_every_s: how often what is held is copied to disk.
    """
    base = hub.learner.versions[0].words if words0 is None else words0
    serving = Serving(live_words(base, layout=hub.learner.layout), hub.learner.layout)
    registry = serving.registry
    asked = sources or [await each.source() for each in (*others, hub)]
    known = make_sources(registry, *asked)
    node_metrics = CountedRefusals(registry.registry, serving.refusals)
    serving.sync = PolicySync(
        make_fetcher(hub.made, known, registry, attempts=2),
        HeldVersion(
            serving.weights,
            serving.policy,
            layout=hub.learner.layout,
            in_place=state_dir.name == IN_PLACE,
            hand_over=serving.hand_over,
            saved=SavedPolicy(
                state_dir,
                layout=hub.learner.layout,
                public_key=hub.made.run.learner_public_key,
                run_id=hub.made.run_id,
                save_every_s=save_every_s,
                count_refusal=lambda reason: serving.refusals.update([reason]),
                clock=SystemClock(),
            ),
            monotonic=time.monotonic,
        ),
        watch=known.announcements,
        transfer_metrics=registry.metrics,
        metrics=SamplerMetrics(registry.registry),
        node_metrics=node_metrics,
        clock=SystemClock(),
    )
    ready, stopping = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serving.sync.run(ready=ready.set, stopping=stopping))
        await ready.wait()
        yield serving
        stopping.set()
