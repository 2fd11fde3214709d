"""A word gone bad in a sampler's memory is mended by its frame within two heartbeats of being noticed."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from node.coordinator.fleet.peer_reports import HeartbeatAnswer, HeartbeatReport
from node.coordinator.peers.peers import Peers
from node.identity.peer import Peer
from node.values.policy import PolicyVersion
from node.values.roles import Role
from sampler.engines.engine import EngineSettings
from sampler.engines.torch import torch_engine
from sampler.engines.torch.torch_engine import TorchEngine
from sampler.engines.words.model_words import version_of
from sampler.versions.held_version import MemoryScrub
from support.identity import MadeRun
from support.model_words import words_of
from support.sampler import learner_of, sampled
from support.waiting import until

HEARTBEAT_S = 1.0
"""Time enough for one frame even on a machine that is busy: what is counted are heartbeats."""


@dataclass(slots=True)
class Ears:
    """Ears of the coordinator: what it hears from its sampler, and what it answers."""

    heartbeats: list[tuple[PolicyVersion | None, bool]] = field(default_factory=list)
    """(held, must repair), in order."""
    hears: PolicyVersion | None = None
    """Heard instead, once."""


@pytest.fixture
def ears(monkeypatch: pytest.MonkeyPatch) -> Ears:
    ears, heartbeat = Ears(), Peers.heartbeat

    def heard(self: Peers, peer: Peer, said: HeartbeatReport, **rest: Any) -> HeartbeatAnswer:
        if peer.role is not Role.SAMPLER:
            return heartbeat(self, peer, said, **rest)
        if ears.hears is not None:
            said, ears.hears = replace(said, held=ears.hears), None
        answer = heartbeat(self, peer, said, **rest)
        ears.heartbeats.append((said.held, answer.must_repair))
        return answer

    monkeypatch.setattr(Peers, "heartbeat", heard)
    return ears


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[TorchEngine]:
    """The engines of the samplers that are built."""
    built: list[TorchEngine] = []

    load = torch_engine.load

    def kept(settings: EngineSettings) -> TorchEngine:
        built.append(load(settings))
        return built[-1]

    monkeypatch.setattr(torch_engine, "load", kept)
    return built


async def test_a_word_gone_bad_in_memory_is_mended_by_its_frame_within_two_heartbeats(
    made: MadeRun,
    base: TorchEngine,
    model_dir: Path,
    ears: Ears,
    engines: list[TorchEngine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learner = learner_of(made, base)
    artifact = learner.signed(1, None)
    signed = learner.versions[1].version

    async def is_mended(noticed: int, *, repairs: int) -> None:
        await until(lambda: len(ears.heartbeats) > noticed + 2)
        assert ears.heartbeats[noticed + 2] == (signed, False)
        np.testing.assert_array_equal(words_of(live, layout=layout), learner.words(1))
        assert sampler.value("repairs_total") == repairs
        assert sampler.transferred("frames_mended_total") == repairs

    # Before the sampler starts: a scrub under way would notice what the coordinator is to notice.
    with monkeypatch.context() as unscrubbed:
        unscrubbed.setattr(MemoryScrub, "check_next", lambda self, live: None)
        async with sampled(made, base, model_dir, heartbeat_interval_s=HEARTBEAT_S) as (_, peer, sampler):
            await peer.publish(*artifact)
            await until(lambda: (signed, False) in ears.heartbeats)
            (engine,) = engines
            live, layout = engine.weights.live, engine.layout
            good = live.read(layout.frames[0]).copy()
            spoilt = good ^ (np.arange(good.size) == 7)
            live.write(layout.frames[0], spoilt)
            ears.hears = version_of(1, live, layout=layout)
            await until(lambda: any(must_repair for _, must_repair in ears.heartbeats))
            noticed = next(n for n, (_, must_repair) in enumerate(ears.heartbeats) if must_repair)
            assert ears.heartbeats[noticed][0] != signed
            await is_mended(noticed, repairs=1)

            unscrubbed.undo()
            # The heartbeat that says nothing of it yet is the one that has the sampler look.
            noticed = len(ears.heartbeats)
            live.write(layout.frames[0], spoilt)
            await until(lambda: sampler.value("repairs_total") == 2)
            await is_mended(noticed, repairs=2)
