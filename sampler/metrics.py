"""A sampler's metrics. The costs of moving policy versions are in node/telemetry/transfer_metrics.py."""

import enum
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry

from node.telemetry.metric_factory import MetricFactory
from node.values.groups.failure import FAULTS, Failure
from node.values.groups.reward_finding import RewardCheck

_GROUP_BUCKETS_S: Final = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
_TURN_BUCKETS: Final = (1, 2, 3, 5, 8, 16, 32, 64, 128)
_SWAP_BUCKETS_S: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)

PACE_WINDOW_S: Final = 60.0


class Dropped(enum.StrEnum):
    """Why a leased group is not submitted: the closed set of ``reason`` labels of dropped groups."""

    LOST = "lost"
    """The hub gave the lease to another sampler."""
    REFUSED = "refused"
    """The prompt could not be made or sampled, or the hub refused the group for good."""
    UNGRADED = "ungraded"
    """The grader raised, was killed, or does not start."""
    DOUBTFUL = "doubtful"
    """The policy it was drawn from may be damaged."""
    ENGINE = "engine"
    """The engine failed while it was drawn."""
    TASK = "task"
    """The run's task or its code was changed, and was loaded again."""
    STOPPING = "stopping"
    """The sampler stopped first."""


_READINGS: Final = {
    "held_version": "The policy version sampled from; -1: none.",
    "policy_age_seconds": "Since the held version was published, by two clocks.",
    "starving_seconds": "How long newer versions were available and none was taken.",
    "engine_waiting_requests": "Groups in the engine without a token yet: for memory or their prompt.",
    "engine_cache_ratio": "Of the engine's memory for keys and values, what is in use.",
    "engine_asked_ratio": "Completions in the engine over those it draws at once; above 1 some wait.",
    "concurrency_groups": "Groups generated at once, at most.",
    "unbegun_groups": "Leases whose prompts are being made or wait for the engine.",
    "outbox_groups": "Graded groups not yet submitted.",
    "running_leases": "Leases being worked on, from prompt to submission.",
}
"""Gauges that are read where their values are."""

_GRADER_READINGS: Final[Mapping[str, str]] = {
    "grader_processes": "Processes that run the task's code.",
    "grader_queue_requests": "Prompts, replies and gradings waiting.",
}


class GraderMetrics:
    """The instruments of whoever runs graders, for the event loop's thread."""

    def __init__(self, registry: CollectorRegistry, role: str, readings: Mapping[str, str]) -> None:
        """Make them for ``role``, and gauges that are read where their values are: name -> text."""
        new = MetricFactory(registry, role)
        self.grader_kills = new.counter("grader_kills", "Grader processes killed at a limit or found dead.")
        self._grader_outages = new.counter(
            "grader_outages", "Attempts to grade that failed, through no fault of the prompt.", "reason"
        )
        self._readings = {
            name: new.gauge(name, text) for name, text in {**_GRADER_READINGS, **readings}.items()
        }

    def count_grader_outage(self, reason: str, times: int) -> None:
        self._grader_outages.labels(reason).inc(times)

    def watch(self, **readings: Callable[[], float]) -> None:
        """Read these gauges at every collection."""
        for name, reading in readings.items():
            self._readings[name].set_function(reading)


class VerifierMetrics(GraderMetrics):
    """The verifier's instruments."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(
            registry, "verifier", {"cpu_seconds": "CPU time of the verifier's process and its graders."}
        )
        new = MetricFactory(registry, "verifier")
        self.checks = new.counter("checks", "Groups whose rewards were worked out again.", "outcome")
        self.check_seconds = new.histogram(
            "check_seconds",
            "Working out a group's rewards again, including the wait for a grader.",
            buckets=_GROUP_BUCKETS_S,
        )
        for outcome in RewardCheck:
            self.checks.labels(outcome)


class SamplerMetrics(GraderMetrics):
    """The sampler's instruments, for the event loop's thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, "sampler", _READINGS)

        new = MetricFactory(registry, "sampler")
        self.drawn_tokens = 0
        """Tokens drawn for finished groups."""
        self._tokens = new.counter("tokens", "Tokens drawn for finished groups.")
        self.decode_steps = new.counter(
            "decode_steps", "Decode steps, each a token of every running completion."
        )
        self.groups = new.counter(
            "groups", "Verdicts on this sampler's groups; one may get several.", "verdict"
        )
        self.dropped_groups = new.counter("dropped_groups", "Leased groups that are not submitted.", "reason")
        self._prompt_faults = new.counter(
            "prompt_faults", "Leases given back because their prompts could not be answered.", "reason"
        )
        self.reply_seconds = new.histogram(
            "reply_seconds",
            "From a turn to the reply, including waits for a grader.",
            buckets=_GROUP_BUCKETS_S,
        )
        self.completion_turns = new.histogram(
            "completion_turns", "Turns of a completion, where the task replies.", buckets=_TURN_BUCKETS
        )
        self.price_per_hour = new.gauge("price_per_hour", "The machine's price, as configured; 0: unknown.")
        self.reward_mean = new.gauge("reward_mean", "Mean reward of the newest graded group of training.")
        self.abstained_completions = new.counter(
            "abstained_completions", "Completions that the grader returned no reward for (None)."
        )
        self.swap_seconds = new.histogram(
            "swap_seconds",
            "Changing to a version between decode steps, including caches.",
            buckets=_SWAP_BUCKETS_S,
        )
        self.dropped_fetches = new.counter(
            "dropped_fetches", "Fetches of a policy version that ended without it.", "reason"
        )
        self.repairs = new.counter("repairs", "Times the held policy was found damaged.")
        self.engine_restarts = new.counter("engine_restarts", "Times the engine failed and was loaded again.")
        self.probe_failures = new.counter("probe_failures", "Probes of a version that had no finite logprob.")
        for fault in FAULTS:
            self._prompt_faults.labels(fault)

    def count_tokens(self, tokens: int) -> None:
        """Count tokens drawn for a finished group."""
        self.drawn_tokens += tokens
        self._tokens.inc(tokens)

    def count_prompt_fault(self, fault: Failure) -> None:
        self._prompt_faults.labels(fault).inc()


class Pace:
    """How fast a counter grows, over the last minute; looked at now and then, by one thread."""

    def __init__(self, total: Callable[[], float], *, monotonic: Callable[[], float]) -> None:
        self._total = total
        self._monotonic = monotonic
        self._looks: deque[tuple[float, float]] = deque([(monotonic(), total())])

    def per_s(self) -> float:
        """Return its mean growth per second since the look ``PACE_WINDOW_S`` ago, or since the first one."""
        now, total = self._monotonic(), self._total()
        self._looks.append((now, total))
        while len(self._looks) > 2 and self._looks[1][0] <= now - PACE_WINDOW_S:
            self._looks.popleft()
        since_s, before = self._looks[0]
        return (total - before) / (now - since_s) if now > since_s else 0.0
