"""One receiver at the end of 100 Mbit/s and 150 ms: a step, a keyframe, and what others would send."""

import statistics
import time
from collections.abc import Iterator
from typing import Final

import numpy as np

from bench.sync_lab import rivals
from bench.sync_lab.lab import Facts, Lab, is_exact
from bench.sync_lab.network import Line
from bench.sync_lab.versions import Training

LINE: Final = Line(rate_mbit=100, round_trip_ms=150)
BETWEEN_STEPS_S: Final = 1.5


def step(lab: Lab) -> Iterator[Facts]:
    """A 1 % step of 135 M parameters, against the whole file over HTTP."""
    training = lab.smollm2()
    file = training.directory / "model.bin"
    file.write_bytes(np.load(training.directory / "words0.npy").tobytes())
    with (
        lab.bare_line(LINE) as (near, far, link, directory),
        rivals.nginx(near, file.parent, directory / "nginx"),
    ):
        http_s = rivals.curl(far, link.a, file.name, directory / "fetched")
    yield {"what": "whole file over HTTP (nginx, curl)", "bytes": file.stat().st_size, "seconds": http_s}
    yield _our_steps(lab, training, http_s=http_s)
    file.unlink()


def keyframe(lab: Lab) -> Iterator[Facts]:
    """A keyframe of 135 M parameters, for who comes late."""
    training = lab.smollm2()
    published = training.keyframes[0]
    with lab.wired(training, LINE) as wired:
        (done,) = wired.synced(published)
        yield {
            "what": "keyframe",
            "bytes": published.size_bytes,
            "seconds": done.verified_s,
            "served_s": done.served_s,
            "wire_bytes": wired.egress_bytes,
            "over_bytes_by_bandwidth": done.verified_s / (published.size_bytes / LINE.bytes_per_s),
        }


def _our_steps(lab: Lab, training: Training, *, http_s: float) -> Facts:
    times, wire = [], []
    with lab.wired(training, LINE) as wired:
        for published in training.steps:
            time.sleep(BETWEEN_STEPS_S)  # a learner's step takes longer; nothing is under way between two
            before = wired.egress_bytes
            times += wired.synced(published)
            wire.append(wired.egress_bytes - before)
        exact = is_exact(wired.receivers, training)
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
