"""The weight half of one or more samplers as a process: PolicySync, its fetcher, sources and disk.

Says, in lines of JSON:

    {"held": VERSION, "name": NAME, "verified_s": T, "served_s": T, "received_bytes": B}
        a version, when every word had the signed digest, and when it was on disk and handed over to be served
    {"received_bytes": B, "now_s": T}
        asked for by {"count": true}: payload bytes of all receivers so far
    {"is_exact": true}
        asked for by {"compare": FILE}: the words held against a .npy
    {"calls_s": [...]}
        at {"end_probe": true}: how long each control call took that was made, one after the other, since
        {"probe": [VERSION, BASE]}
"""

import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from prometheus_client import CollectorRegistry

from bench.sync_lab.hub import say
from bench.sync_lab.versions import load_layout
from heterorl.v1 import policy_pb2, policy_pb2_grpc
from node.enrolment.init_run import IDENTITY_DIRECTORY
from node.errors import Reason
from node.identity.identity_store import load_identity
from node.identity.run_description import RunDescription
from node.process.memory import keep_freed_memory
from node.rpc.channel import Purpose, dial
from node.system.clock import SystemClock
from node.telemetry.logging import configure_logging
from node.telemetry.metrics import NodeMetrics
from node.telemetry.transfer_metrics import TransferMetrics
from node.values.groups.rollout import LeaseGrant
from node.values.policy import ArtifactKey, PolicyVersion
from node.values.roles import Role
from node.weights.format.digests import Words
from node.weights.format.manifest import Manifest
from node.weights.transfer.fetcher import Fetcher
from node.weights.transfer.sources import Sources, dial_source
from node.wire.mapping import to_wire
from sampler.engines.engine_thread import Change
from sampler.engines.words.model_words import ArrayWords, ModelWords
from sampler.metrics import SamplerMetrics
from sampler.served_policy import ServedPolicy
from sampler.versions.delta_log import LoggedArtifact
from sampler.versions.held_version import HeldVersion
from sampler.versions.policy_sync import PolicySync
from sampler.versions.saved_policy import SavedPolicy


class TimedDisk(SavedPolicy):
    """Notes when a version was verified: the moment it is first to be remembered."""

    verified_s = 0.0

    def remember(self, manifest: Manifest, payloads: LoggedArtifact | None) -> None:
        self.verified_s = time.monotonic()
        super().remember(manifest, payloads)


class LiveArray:
    """Live words of a sampler that computes nothing. See ``sampler.engines.words.model_words.LiveWords``."""

    def __init__(self, words: Words) -> None:
        self._live: ModelWords = ArrayWords(words)
        self._words = words.size

    @property
    def live(self) -> ModelWords:
        return self._live

    @property
    def spares(self) -> "LiveArray":
        return self

    def new_spare(self) -> ModelWords:
        return ArrayWords(np.empty(self._words, np.uint16))

    def swap(self, spare: ModelWords) -> ModelWords:
        before, self._live = self._live, spare
        return before

    def settle(self) -> None:
        """Nothing else has to be what the live words say."""


class Receiver:
    """One sampler without an engine."""

    def __init__(self, name: str, settings: dict[str, Any], run: RunDescription, words0: Words) -> None:
        self.name = name
        self._weights = LiveArray(np.array(words0))
        self._registry = CollectorRegistry()
        metrics, state, now = TransferMetrics(self._registry), Path(settings["state"]) / name, time.time()
        identity = load_identity(state / IDENTITY_DIRECTORY)
        assert identity is not None
        sources = Sources(
            [
                dial_source(
                    address,
                    identity,
                    connections=settings["connections"],
                    now=now,
                    server=Role(settings["server"]),
                )
                for address in settings["sources"]
            ],
            clock=SystemClock(),
            random=random.random,
            metrics=metrics,
        )
        self._layout = load_layout(Path(settings["training"]))
        self._disk = TimedDisk(
            state,
            layout=self._layout,
            public_key=run.learner_public_key,
            run_id=run.run_id,
            save_every_s=3600,
            count_refusal=_ignore_reason,
            clock=SystemClock(),
        )
        policy = ServedPolicy(is_generating=lambda _: False)
        policy.answered(0, LeaseGrant((), 0.0, ""), had_to_ask=False, now=0.0)  # it stops nowhere
        self.sync = PolicySync(
            Fetcher(
                sources,
                public_key=run.learner_public_key,
                run_id=run.run_id,
                metrics=metrics,
                random=random.random,
            ),
            HeldVersion(
                self._weights,
                policy,
                layout=self._layout,
                in_place=False,
                hand_over=self._take,
                saved=self._disk,
                monotonic=time.monotonic,
            ),
            watch=sources.announcements,
            transfer_metrics=metrics,
            metrics=SamplerMetrics(self._registry),
            node_metrics=NodeMetrics(self._registry, roles=(), clock=SystemClock()),
            clock=SystemClock(),
        )

    @property
    def received_bytes(self) -> int:
        """Payload bytes so far, repeats included."""
        name = "heterorl_node_transfer_bytes_total"
        counts = (
            self._registry.get_sample_value(name, {"kind": kind, "direction": "in"})
            for kind in ("keyframe", "delta")
        )
        return int(sum(count or 0 for count in counts))

    def holds(self, words: Words) -> bool:
        """Return whether these are the live words."""
        live = self._weights.live
        return all(np.array_equal(live.read(frame), words[frame.slice]) for frame in self._layout.frames)

    async def _take(self, change: Change) -> PolicyVersion | None:
        version = await asyncio.to_thread(change)
        served_s = time.monotonic()
        if version is not None:
            say(
                held=version.number,
                name=self.name,
                verified_s=self._disk.verified_s,
                served_s=served_s,
                received_bytes=self.received_bytes,
            )
        return version


async def receive(settings: dict[str, Any]) -> None:
    """Follow the head with every receiver until the input ends."""
    run = RunDescription.load(Path(settings["run"]) / "run.json")
    words0 = np.load(Path(settings["training"]) / "words0.npy", mmap_mode="r")
    receivers = [Receiver(name, settings, run, words0) for name in settings["names"]]
    stopping = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        ready = [asyncio.Event() for _ in receivers]
        for receiver, is_ready in zip(receivers, ready, strict=True):
            tasks.create_task(receiver.sync.run(ready=is_ready.set, stopping=stopping))
        for is_ready in ready:
            await is_ready.wait()
        say(ready=True)
        probe: asyncio.Task[None] | None = None
        while line := await asyncio.to_thread(sys.stdin.readline):
            order = json.loads(line)
            if "count" in order:
                say(received_bytes=sum(each.received_bytes for each in receivers), now_s=time.monotonic())
            elif "probe" in order:
                probe = tasks.create_task(_probe(settings, run, ArtifactKey(*order["probe"]), stopping))
            elif "compare" in order:
                words = np.load(order["compare"], mmap_mode="r")
                say(is_exact=all(receiver.holds(words) for receiver in receivers))
            elif "end_probe" in order and probe is not None:
                probe.cancel()
        stopping.set()


async def _probe(
    settings: dict[str, Any], run: RunDescription, key: ArtifactKey, stopping: asyncio.Event
) -> None:
    """Make a control call after another, on a channel of their own; say how long each took, seconds."""
    identity = load_identity(Path(settings["state"]) / settings["names"][0] / IDENTITY_DIRECTORY)
    assert identity is not None
    channel = dial(
        settings["sources"][0],
        identity,
        purpose=Purpose.CONTROL,
        now=time.time(),
        server=Role(settings["server"]),
    )
    stub = policy_pb2_grpc.PolicyServiceStub(channel)
    calls_s: list[float] = []
    await channel.channel_ready()
    try:
        while not stopping.is_set():
            started = time.monotonic()
            await stub.GetManifest(
                policy_pb2.GetManifestRequest(key=to_wire(policy_pb2.ArtifactKey, key)), timeout=30
            )
            calls_s.append(time.monotonic() - started)
    finally:
        say(calls_s=calls_s)
        await channel.close()


def _ignore_reason(reason: Reason) -> None:
    """Refusals are in the log."""


if __name__ == "__main__":
    keep_freed_memory()  # as node/process/bootstrap.py does
    configure_logging(log_format="json", level="info", roles=["sampler"])
    uvloop.run(receive(json.loads(sys.argv[1])))
