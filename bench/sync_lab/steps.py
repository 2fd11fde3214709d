"""One receiver at the end of 100 Mbit/s and 150 ms: a step, a keyframe, and what others would send."""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np

from bench.sync_lab import rivals
from bench.sync_lab.lab import Facts, Lab, is_exact, put, syncs
from bench.sync_lab.network import Line, Link, Network
from bench.sync_lab.peers import Process
from bench.sync_lab.versions import Model, Training

LINE: Final = Line(rate_mbit=100, round_trip_ms=150)
CONNECTIONS: Final = 8
BETWEEN_STEPS_S: Final = 1.5


def step(lab: Lab) -> Iterator[Facts]:
    """A 1 % step of 135 M parameters, against the whole file over HTTP."""
    training = lab.training(Model(), steps=6 if lab.is_quick else 12, keyframes=1)
    file = training.directory / "model.bin"
    file.write_bytes(np.load(training.directory / "words0.npy").tobytes())
    http_s = _over_http(lab, file)
    yield {"what": "whole file over HTTP (nginx, curl)", "bytes": file.stat().st_size, "seconds": http_s}
    yield _our_steps(lab, training, http_s=http_s)
    file.unlink()


def keyframe(lab: Lab) -> Iterator[Facts]:
    """A keyframe of 135 M parameters, for who comes late."""
    training = lab.training(Model(), steps=6 if lab.is_quick else 12, keyframes=1)
    size = training.keyframes[0].size_bytes
    with _one_receiver(lab, training) as (hub, receiver, link):
        announced_s = put(hub, training.keyframes[0].name)
        (done,) = syncs(receiver, version=1, announced_s=announced_s)
        yield {
            "what": "keyframe",
            "bytes": size,
            "seconds": done.verified_s,
            "served_s": done.served_s,
            "wire_bytes": link.passed()[0].bytes,
            "over_bytes_by_bandwidth": done.verified_s / (size / LINE.bytes_per_s),
        }


@contextmanager
def _one_receiver(lab: Lab, training: Training) -> Iterator[tuple[Process, Process, Link]]:
    """Run a hub and a receiver at the ends of ``LINE``."""
    with lab.fleet() as fleet, Network() as network:
        near, far = network.namespace("hub"), network.namespace("sampler")
        link = network.link(near, far, LINE)
        with (
            fleet.hub(near, training.directory) as hub,
            fleet.receivers(far, training.directory, sources=[link.a], connections=CONNECTIONS) as receiver,
        ):
            yield hub, receiver, link


def _our_steps(lab: Lab, training: Training, *, http_s: float) -> Facts:
    times, wire = [], []
    with _one_receiver(lab, training) as (hub, receiver, link):
        for published in training.steps:
            time.sleep(BETWEEN_STEPS_S)  # a learner's step takes longer; nothing is under way between two
            before = link.passed()[0].bytes
            announced_s = put(hub, published.name)
            (done,) = syncs(receiver, version=published.version, announced_s=announced_s)
            times.append(done)
            wire.append(link.passed()[0].bytes - before)
        exact = is_exact(receiver, training)
    # The first comes over connections that have carried nothing, into memory nobody has touched.
    warm = [each.verified_s for each in times[1:]]
    return {
        "what": "step",
        "density": training.density,
        "bytes": statistics.median(published.size_bytes for published in training.steps),
        "wire_bytes": statistics.median(wire[1:]),
        "seconds": statistics.median(warm),
        "served_s": statistics.median(each.served_s for each in times[1:]),
        "slowest_s": max(warm),
        "fastest_s": min(warm),
        "first_s": times[0].verified_s,
        "times_faster_than_http": http_s / statistics.median(warm),
        "is_exact": exact,
    }


def _over_http(lab: Lab, file: Path) -> float:
    with lab.fleet() as fleet, Network() as network:
        near, far = network.namespace("hub"), network.namespace("sampler")
        link = network.link(near, far, LINE)
        with rivals.nginx(near, file.parent, fleet.directory / "nginx"):
            return rivals.curl(far, link.a, file.name, fleet.directory / "fetched")
