"""Metrics of a contributor."""

from prometheus_client import CollectorRegistry

from node.telemetry.metric_factory import MetricFactory


class ContributorMetrics:
    """A contributor's instruments; used on the event loop's thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        new = MetricFactory(registry, "contributor")
        self.version = new.gauge("version", "Version that the next contribution is measured from.")
        self.held_groups = new.gauge("held_groups", "Groups dealt to it that wait for a step.")
        self.batches = new.counter(
            "batches", "Batches by what came of them: step, uninformative, not_finite.", "outcome"
        )
        self.idle_steps = new.counter(
            "idle_steps", "Steps that changed nothing: the learning rate's schedule has ended."
        )
        self.contributions = new.counter(
            "contributions", "Contributions by what became of them: merged, refused.", "outcome"
        )
        self.payload_bytes = new.counter("payload_bytes", "Bytes of changes handed in, as coded.")
        self.change_norm = new.unknown("change_norm", "Norm of the newest change.")
        self.lost_streams = new.counter("lost_streams", "Losses of the stream to the learner.")
        self.refused_streams = new.counter(
            "refused_streams", "Streams that the learner ended for now, by reason.", "reason"
        )
        self.step_seconds = new.histogram("step_seconds", "From batch to new parameters.")
        self.hand_in_seconds = new.histogram("hand_in_seconds", "Coding a change.")
        self.answer_seconds = new.histogram(
            "answer_seconds", "From a contribution to the words of the version that has it."
        )
