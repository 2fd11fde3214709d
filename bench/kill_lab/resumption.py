"""Bytes that a restarted process fetches, compared with those on its disk when it was killed."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from bench.kill_lab.stage import Stage
from bench.kill_lab.truth import OnDisk
from bench.kill_lab.witness import Key, Witness
from deploy.runs.observation import scrape

POLL_S: Final = 0.1
GIVE_UP_S: Final = 60.0
"""A version not fetched by then was overtaken by a newer one."""

_SLACK_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class Resumed:
    """A fetch that a kill cut and a restart went on with."""

    name: str
    key: Key
    size_bytes: int
    staged_bytes: int
    """In whole frames on disk when it was killed: what a restart finds."""
    fetched_bytes: int
    """After the restart, of anything, until the version was served."""

    @property
    def is_kept(self) -> bool:
        return self.fetched_bytes <= self.size_bytes - self.staged_bytes + _SLACK_BYTES


async def watch_sampler(
    name: str, on_disk: Mapping[Key, OnDisk], *, stage: Stage, witness: Witness
) -> Resumed | None:
    """Wait until a restarted sampler serves what it was fetching; None: it was not, or went another way."""
    partial = [
        (key, found) for key, found in on_disk.items() if found.intact_bytes > 0 and not found.is_whole
    ]
    if not partial:
        return None
    key, found = max(partial)
    received: list[tuple[float, int]] = [(0.0, 0)]
    deadline_s = time.monotonic() + GIVE_UP_S
    while time.monotonic() < deadline_s:
        await asyncio.sleep(POLL_S)
        looked_at_s = time.time()
        now = await _received_bytes(stage.ports.telemetry[name])
        if now is not None:
            received.append((looked_at_s, now))
        held = witness.since_start(name)
        if len(held) < 2:
            continue
        first = held[1]
        if first.version != key[0] or len([k for k in witness.sizes if k[0] == key[0]]) != 1:
            return None
        # The last look before the version was served: what came later may be of the next one.
        fetched = max(count for at_s, count in received if at_s <= first.at_s)
        return Resumed(name, key, found.signed.size_bytes, found.intact_bytes, fetched)
    return None


async def watch_relay(
    name: str, on_disk: Mapping[Key, OnDisk], *, stage: Stage, witness: Witness
) -> Resumed | None:
    """Wait until nothing is under way at a restarted relay; None where nothing was when it was killed."""
    partial = {key: found for key, found in on_disk.items() if found.intact_bytes > 0 and not found.is_whole}
    if not partial:
        return None
    # Not what was only begun: all of it is still to come.
    had = {key for key, found in on_disk.items() if found.is_whole}
    versions = stage.state(name) / "versions"
    deadline_s = time.monotonic() + GIVE_UP_S
    while time.monotonic() < deadline_s:
        await asyncio.sleep(POLL_S)
        if any((versions / "incoming").iterdir()):
            continue
        received = await _received_bytes(stage.ports.telemetry[name])
        if received is None or any((versions / "incoming").iterdir()):
            continue
        now = {_key(path.name) for path in (versions / "complete").iterdir()}
        if not now.issuperset(partial):
            return None
        size = sum(witness.sizes.get(key, 0) for key in now - had)
        staged = sum(found.intact_bytes for found in partial.values())
        return Resumed(name, max(partial), size, staged, received)
    return None


def _key(directory: str) -> Key:
    version, _, base = directory.partition("-")
    return int(version), -1 if base == "key" else int(base)


async def _received_bytes(port: int) -> int | None:
    """Return the payload bytes of weights a process has received since it began; None: it does not answer."""
    metrics = await scrape(port)
    if metrics is None:
        return None
    name = "heterorl_node_transfer_bytes_total"
    return int(sum(metrics.total(name, direction="in", kind=kind) for kind in ("keyframe", "delta")))
