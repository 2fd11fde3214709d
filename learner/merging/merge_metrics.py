"""Metrics of a learner that merges."""

from collections.abc import Collection

from node.telemetry.metric_factory import MetricFactory


class MergeMetrics:
    """Written from the event loop's thread."""

    def __init__(self, new: MetricFactory) -> None:
        self.contributors = new.unknown("contributors", "Contributors that are connected.")
        self.round_seconds = new.gauge("round_seconds", "Age of the newest merge, or of this process.")
        self._awaited_seconds = new.gauge(
            "awaited_seconds", "Age of the round, by contributor for which it waits.", "contributor"
        )
        self.dealt_groups = new.gauge("dealt_groups", "Groups that are with contributors.")
        self.held_payload_bytes = new.gauge(
            "held_payload_bytes", "Payloads of contributions that wait for a merge."
        )
        self.outer_rate = new.unknown("outer_rate", "Outer learning rate of the next merge.")
        self.change_norm = new.gauge(
            "change_norm", "Norm of the newest change of a contributor.", "contributor"
        )
        self.change_cosine = new.gauge(
            "change_cosine", "Cosine of that change with the mean of its merge.", "contributor"
        )
        self.diverges = new.gauge(
            "merges_diverge", "1: merged changes grew as in divergence, and the rate is lowered."
        )
        self.contributions = new.counter(
            "contributions",
            "Contributions by what became of them: merged, empty, late, groups, broken, norm, revoked.",
            "contributor",
            "outcome",
        )
        self.doubted_groups = new.counter(
            "doubted_groups",
            "Groups that a contributor alone says taught nothing, dealt to others.",
            "contributor",
        )
        self.received_bytes = new.counter("contribution_bytes", "Bytes of payloads received.", "contributor")

    def show_round(self, age_s: float, *, late: Collection[str]) -> None:
        """Show the age of the newest merge, and whom the next one waits for."""
        self.round_seconds.set(age_s)
        self._awaited_seconds.clear()
        for name in late:
            self._awaited_seconds.labels(name).set(age_s)
