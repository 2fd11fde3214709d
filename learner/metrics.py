"""The learner's metrics: one place for names, units and buckets."""

import math
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from learner.step_log import StepLine

_SECONDS: Final = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)
_VERSIONS: Final = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)


class LearnerMetrics:
    """The learner's instruments, each written from the event loop's thread."""

    def __init__(self, registry: CollectorRegistry, *, peak_tflops: float = 0.0) -> None:
        """Register them.

        Args:
            peak_tflops: of the device at the compute dtype, 10^12 operations a second; 0: not known.
        """

        def gauge(what: str, help_text: str, *labels: str) -> Gauge:
            return Gauge(f"heterorl_learner_{what}", help_text, labels, registry=registry)

        def counter(what: str, help_text: str, *labels: str) -> Counter:
            return Counter(f"heterorl_learner_{what}", help_text, labels, registry=registry)

        def histogram(what: str, help_text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            name = f"heterorl_learner_{what}"
            return Histogram(name, help_text, labels, buckets=buckets, registry=registry)

        self._of_step = {
            name: gauge(name, help_text)
            for name, help_text in (
                ("reward_mean", "Mean reward of the newest batch."),
                (
                    "reward_deviation",
                    "Standard deviation of rewards within a group, mean of the newest batch.",
                ),
                ("zero_advantage_ratio", "Share of the newest batch's groups whose rewards are all equal."),
                ("completion_tokens_mean", "Mean length of the newest batch's completions."),
                (
                    "completion_tokens_p95",
                    "Length that 95 % of the newest completions do not exceed.",
                ),
                ("completion_tokens_max", "Longest completion of the newest batch."),
                ("prompt_tokens_mean", "Mean length of the newest batch's prompts."),
                ("cut_ratio", "Share of the newest batch's completions that ended at the token limit."),
                ("kl_nats", "KL(behaviour || learner) per token of the newest batch."),
                ("reference_kl_nats", "KL(learner || base model) per token of the newest batch."),
                ("surprisal_nats", "Minus the mean learner logprob of the newest batch."),
                ("ess_ratio", "Effective sample size of the newest batch over its size."),
                ("clip_ratio", "Share of the newest batch that was clipped."),
                ("truncated_ratio", "Share of the newest batch's tokens whose ratio was cut to a ceiling."),
                (
                    "trust_ratio",
                    "Mean share of the correction for divergence that the newest completions got.",
                ),
                ("gradient_norm", "Norm of the newest gradient before clipping."),
                ("learning_rate", "Of the newest step, by learner.lr_schedule."),
                ("staleness_mean_versions", "Mean staleness of the newest batch's groups."),
                (
                    "recommended_staleness_versions",
                    "Staleness up to which half of the effective sample size or more is expected to be left.",
                ),
                ("tokens_per_second", "Completion tokens of the newest step over its time."),
            )
        }
        """By name, see ``StepLine.numbers``."""
        for of_step in self._of_step.values():
            of_step.set(math.nan)
        self._grader_metric = gauge(
            "grader_metric", "What graders measured besides the reward, mean of the newest batch.", "name"
        )
        self.sampler_mismatch_nats = gauge(
            "sampler_mismatch_nats",
            "KL per token of a sampler's groups beyond the drift of the policy: what its engine adds.",
            "sampler",
        )
        self.sampler_mismatch_error_nats = gauge(
            "sampler_mismatch_error_nats",
            "Standard error of the sampler's mismatch; 10: nothing is known.",
            "sampler",
        )
        self.sampler_measured_groups = gauge(
            "sampler_measured_groups",
            "Groups that the sampler's mismatch rests on, older ones as fractions.",
            "sampler",
        )
        self._of_age = {
            name: gauge(name, help_text, "age_versions")
            for name, help_text in (
                ("drift_nats", "KL(behaviour || learner) per token that an age alone makes."),
                ("drift_error_nats", "Standard error of that."),
                ("expected_drift_nats", "The same, shrunk by its error towards what is supposed."),
                ("expected_ess_ratio", "Effective sample size over sample size that follows from it."),
            )
        }
        self.unmeasured_samplers = gauge(
            "unmeasured_samplers",
            "Samplers whose groups no other sampler's groups of their age compare with.",
        )
        self.version = gauge("version", "Version of the parameters now.")
        self.best_version = gauge("best_version", "Version kept as the best so far.")
        self.best_version.set(math.nan)
        self.published_version = gauge("published_version", "Newest version signed and stored for upload.")
        self.buffered_groups = gauge("buffered_groups", "Groups that wait for a step.")
        self.groups = counter("groups", "Groups by what became of them here.", "verdict")
        self.doubled_groups = counter(
            "doubled_groups", "Groups delivered again after they were trained on; each was refused."
        )
        self.trained_tokens = counter("trained_tokens", "Completion tokens trained on.")
        self.clamped_tokens = counter(
            "clamped_tokens", "Tokens whose log ratio was clamped before exponentiation."
        )
        self.lost_drain_streams = counter(
            "lost_drain_streams",
            "Times the stream that brings groups was lost; each time it was opened again.",
        )
        self.flop_utilisation = gauge(
            "flop_utilisation_ratio",
            "Model FLOP utilisation of the newest step, against learner.peak_tflops.",
        )
        self.flop_utilisation.set(math.nan)
        self._peak_flops = 1e12 * peak_tflops
        self.step_writes = counter(
            "step_writes",
            "Steps by what became of them at what writes steps down: written, failed, dropped.",
            "writer",
            "outcome",
        )
        self.skipped_steps = counter("skipped_steps", "Steps not taken: the gradient was not finite.")
        self.uninformative_batches = counter(
            "uninformative_batches", "Batches that taught nothing: consumed without a step."
        )
        self.uninformative_ratio = gauge(
            "uninformative_ratio", "Share of the groups of the newest 64 batches that taught nothing."
        )
        self.uninformative_ratio.set(math.nan)
        self.unchanged_versions = counter(
            "unchanged_versions", "Versions not published: they change no word of the one published last."
        )
        self.superseded_versions = counter(
            "superseded_versions", "Versions never published: the next one was ready first."
        )
        self.step_seconds = histogram("step_seconds", "From batch to new parameters.", _SECONDS)
        self.checkpoint_seconds = histogram("checkpoint_seconds", "Making a checkpoint durable.", _SECONDS)
        self.gate_wait_seconds = histogram(
            "gate_wait_seconds", "Wait of a step until the publisher has read the masters.", _SECONDS
        )
        self.publish_seconds = histogram("publish_seconds", "From masters to stored for upload.", _SECONDS)
        self.staleness_versions = histogram(
            "staleness_versions", "Staleness of each group trained on.", _VERSIONS
        )
        self.lag_seconds = histogram(
            "lag_seconds",
            "delivered: spooled to judged; trained: spooled to trained on; total: sampled to trained on.",
            _SECONDS,
            "stage",
        )

    def show_step(self, line: StepLine) -> None:
        """Show a step that was taken."""
        self.show_batch(line)
        self.version.set(line.report.version)
        self.step_seconds.observe(line.report.step_s)
        self.trained_tokens.inc(line.tokens)
        self.clamped_tokens.inc(line.clamped_tokens)
        if self._peak_flops:
            self.flop_utilisation.set(line.flops / max(line.report.step_s, 1e-9) / self._peak_flops)
        for group in line.groups:
            self.staleness_versions.observe(group.staleness_versions)

    def show_batch(self, line: StepLine) -> None:
        """Show the numbers of the newest batch, whether a step was taken on it or not."""
        numbers = line.numbers()
        for name, gauge in self._of_step.items():
            gauge.set(numbers.get(name, math.nan))
        self._grader_metric.clear()  # of the newest batch only, so that there are never more than its names
        for name, mean in line.report.grader_metrics.items():
            self._grader_metric.labels(name).set(mean)

    def show_age(self, age_versions: int, **values: float) -> None:
        """Show what is measured and expected of tokens of an age; NaN: not measured."""
        for name, value in values.items():
            self._of_age[name].labels(str(age_versions)).set(value)
