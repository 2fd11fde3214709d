"""1 Gbit/s over 150 ms: how much of the line, and of what TCP can do on it, a fetch uses."""

import statistics
import time
from collections.abc import Iterator
from typing import Final

from bench.shared.measure import percentile
from bench.sync_lab import rivals
from bench.sync_lab.lab import CONNECTIONS, Facts, Lab, put, steady_goodput, syncs, watched_bytes
from bench.sync_lab.network import Line
from bench.sync_lab.versions import LARGE

LINE: Final = Line(rate_mbit=1000, round_trip_ms=150)


def gigabit(lab: Lab) -> Iterator[Facts]:
    """Two keyframes of 512 MB after each other, control calls meanwhile; plain TCP on such a line first."""
    training = lab.training(LARGE)
    with lab.bare_line(LINE) as (near, far, link, _), rivals.tcp_sender(near):
        size = training.keyframes[0].size_bytes
        progress = rivals.tcp_progress(far, link.a, connections=CONNECTIONS, size_bytes=size)
        ceiling = steady_goodput(progress)
    yield {"what": "plain TCP", "connections": CONNECTIONS, "bytes_per_s": ceiling}
    with lab.wired(training, LINE) as wired:
        hub, receiver = wired.hub, wired.receivers
        for published in training.keyframes:
            time.sleep(2)
            before, cpu_s = wired.egress_bytes, (hub.cpu_s(), receiver.cpu_s())
            received = watched_bytes(receiver, until_bytes=0, until_s=time.monotonic())[-1][1]
            announced_s = put(hub, published.name)
            receiver.tell(probe=[published.version, published.base_version])
            end_bytes = received + published.size_bytes
            progress = watched_bytes(receiver, until_bytes=end_bytes, until_s=announced_s + 60)
            receiver.tell(end_probe=True)
            calls_s = receiver.answer("calls_s")["calls_s"]
            (done,) = syncs(receiver, version=published.version, announced_s=announced_s)
            steady = steady_goodput([(at_s, count - received) for at_s, count in progress])
            used_s = hub.cpu_s() - cpu_s[0], receiver.cpu_s() - cpu_s[1]
            yield {
                "what": f"keyframe, {'cold' if published.version == 1 else 'warm'} connections",
                "connections": CONNECTIONS,
                "bytes": published.size_bytes,
                "seconds": done.verified_s,
                "served_s": done.served_s,
                "share_of_line": published.size_bytes / done.verified_s / LINE.bytes_per_s,
                "steady_bytes_per_s": steady,
                "steady_share_of_tcp": steady / ceiling,
                "repeated_share": (done.received_bytes - received) / published.size_bytes - 1,
                "wire_bytes": wired.egress_bytes - before,
                "control_calls": len(calls_s),
                "control_median_s": statistics.median(calls_s),
                "control_p99_s": percentile(calls_s, 0.99),
                "hub_cpu_s_per_gb": used_s[0] / published.size_bytes * 1e9,
                "receiver_cpu_s_per_gb": used_s[1] / published.size_bytes * 1e9,
            }
