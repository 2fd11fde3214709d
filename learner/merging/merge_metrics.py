"""Metrics of a learner that merges."""

from node.telemetry.metric_factory import MetricFactory


class MergeMetrics:
    """Written from the event loop's thread."""

    def __init__(self, new: MetricFactory) -> None:
        self.contributors = new.gauge("contributors", "Contributors that are connected.")
        self.round_seconds = new.gauge("round_seconds", "Age of the newest merge, or of this process.")
        self.dealt_groups = new.gauge("dealt_groups", "Groups that are with contributors.")
        self.held_payload_bytes = new.gauge(
            "held_payload_bytes", "Payloads of contributions that wait for a merge."
        )
        self.outer_rate = new.unknown("outer_rate", "Outer learning rate of the next merge.")
        self.change_norm = new.gauge(
            "change_norm", "Norm of the newest change of a contributor.", "contributor"
        )
        self.merged_norm = new.unknown("merged_norm", "Norm of the mean change of the newest merge.")
        self.diverges = new.gauge(
            "merges_diverge", "1: merged changes grew as in divergence, and the rate is lowered."
        )
        self.contributions = new.counter(
            "contributions",
            "Contributions by what became of them: merged, empty, late, groups, broken, norm.",
            "outcome",
        )
        self.received_bytes = new.counter("contribution_bytes", "Bytes of payloads received.")
