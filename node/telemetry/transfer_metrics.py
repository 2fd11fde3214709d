"""Metrics of moving policy versions and rollouts, on every peer that sends or receives them."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from node.telemetry.metric_factory import MetricFactory
from node.values.policy import ArtifactKey

_FETCH_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
_APPLY_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1)


class TransferMetrics:
    """Instruments for any thread; one set per process, shared by its roles."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.mended_frames = 0
        """Frames whose words in memory had changed."""
        self.source_lies = 0
        """Times a source sent what the learner had not signed."""
        new = MetricFactory(registry, "node")
        self._bytes = new.counter(
            "transfer_bytes",
            "Payload bytes received (in) and sent (out), repeats included; rollouts at hub and relays only.",
            "kind",
            "direction",
        )
        self._rollouts_in, self._rollouts_out = (self._bytes.labels("rollout", way) for way in ("in", "out"))
        self._frames = new.counter("frames_applied", "Frames decoded and verified, by codec.", "codec")
        self._damaged = new.counter(
            "frames_damaged",
            "Frames that arrived with another digest than signed; each was fetched again alone.",
        )
        self._repaired = new.counter(
            "frames_mended", "Frames whose words in memory had changed and were made again."
        )
        self._source_faults = new.counter(
            "source_faults",
            "Times a source of policy versions was avoided for a while, by what it did.",
            "fault",
        )
        self._submissions = new.gauge(
            "submission_bytes", "Groups between socket and disk; at the bound, a hub stops reading more."
        )
        self._lingering = new.gauge(
            "lingering_artifacts", "Artifacts kept beyond retention because a peer still fetches them."
        )
        self._bucket_bytes = new.counter(
            "bucket_bytes",
            "Payload bytes read from hubs' buckets (in) and put into this hub's own (out), repeats included.",
            "direction",
        )
        self._bucket_failures = new.counter(
            "bucket_failures", "Operations that this hub's bucket failed; each is tried again.", "operation"
        )
        self._bucket_missing = new.gauge(
            "bucket_missing_artifacts", "Artifacts of this hub that are not in its bucket yet."
        )
        self._bucket_withheld = new.gauge(
            "bucket_withheld_artifacts",
            "Artifacts that this hub announces once they are in its bucket, or after a minute at most.",
        )
        self._stores: list[Callable[[], int]] = []
        self._fetch = new.histogram(
            "fetch_seconds",
            "From the first byte asked for to the last frame verified, by artifact.",
            "kind",
            buckets=_FETCH_BUCKETS_S,
        )
        self._apply = new.histogram(
            "frame_apply_seconds", "Verifying and decoding one frame.", buckets=_APPLY_BUCKETS_S
        )

    def watch_lingering(self, lingering_artifacts: Callable[[], int]) -> None:
        """Add a store whose lingering artifacts are counted whenever metrics are collected."""
        self._stores.append(lingering_artifacts)
        self._lingering.set_function(lambda: sum(count() for count in self._stores))

    def watch_submissions(self, in_flight_bytes: Callable[[], int]) -> None:
        """Show the bytes of groups that came in and are not on disk yet, whenever metrics are collected."""
        self._submissions.set_function(in_flight_bytes)

    def watch_bucket(
        self, *, missing_artifacts: Callable[[], int], withheld_artifacts: Callable[[], int]
    ) -> None:
        """Show how far a bucket is behind its hub, whenever metrics are collected."""
        self._bucket_missing.set_function(missing_artifacts)
        self._bucket_withheld.set_function(withheld_artifacts)

    def count_bucket_bytes(self, direction: str, size_bytes: int) -> None:
        self._bucket_bytes.labels(direction).inc(size_bytes)

    def count_bucket_failure(self, operation: str) -> None:
        self._bucket_failures.labels(operation).inc()

    def count_received(self, key: ArtifactKey, size_bytes: int) -> None:
        self._bytes.labels(_kind(key), "in").inc(size_bytes)

    def count_sent(self, key: ArtifactKey, size_bytes: int) -> None:
        self._bytes.labels(_kind(key), "out").inc(size_bytes)

    def count_model(self, sent_bytes: int) -> None:
        """Count bytes of the base model, handed out to a newcomer."""
        self._bytes.labels("model", "out").inc(sent_bytes)

    def count_rollouts(self, *, received_bytes: int = 0, sent_bytes: int = 0) -> None:
        self._rollouts_in.inc(received_bytes)
        self._rollouts_out.inc(sent_bytes)

    def count_damaged_frame(self) -> None:
        self._damaged.inc()

    def count_repaired_frames(self, frames: int) -> None:
        self.mended_frames += frames
        self._repaired.inc(frames)

    def count_source_fault(self, fault: str) -> None:
        self.source_lies += fault == "lied"
        self._source_faults.labels(fault).inc()

    def count_applied_frame(self, codec: str, *, took_s: float) -> None:
        self._frames.labels(codec).inc()
        self._apply.observe(took_s)

    def count_fetch(self, key: ArtifactKey, *, took_s: float) -> None:
        self._fetch.labels(_kind(key)).observe(took_s)


def _kind(key: ArtifactKey) -> str:
    return "keyframe" if key.is_keyframe else "delta"
