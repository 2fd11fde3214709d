"""The panels of the three dashboards: what a run learns, who takes part, and whom it trusts."""

import enum
from dataclasses import dataclass
from typing import Final

NATS: Final = "suffix: nats"
SHARE: Final = "percentunit"
SECONDS: Final = "s"

PEERS: Final = '{node=~"$node"}'
"""The peers that the reader has chosen; all: the coordinator's process too, which has no name."""


class Kind(enum.Enum):
    """Types of Grafana's panels."""

    LINES = "timeseries"
    HEAT = "heatmap"
    NUMBER = "stat"


@dataclass(frozen=True, slots=True)
class Panel:
    """A picture of some queries."""

    title: str
    text: str
    queries: dict[str, str]
    """Legend -> PromQL."""
    unit: str = "none"
    kind: Kind = Kind.LINES
    from_zero: bool = True
    """Whether 0 is on the axis."""


@dataclass(frozen=True, slots=True)
class Dashboard:
    """Rows of panels; ``name`` is that of its file."""

    name: str
    text: str
    rows: dict[str, tuple[Panel, ...]]


def per_second(counter: str, *by: str) -> str:
    """Return the sum of a counter's rates, by labels."""
    group = f" by ({', '.join(by)}) " if by else ""
    return f"sum{group}(rate({counter}[$__rate_interval]))"


def mean_of(histogram: str, *by: str, of: str = "") -> str:
    """Return the mean of what a histogram observed lately, by labels; ``of`` matches labels."""
    whole, number = (per_second(f"{histogram}_{part}{of}", *by) for part in ("sum", "count"))
    return f"{whole} / {number}"


def quantile_of(histogram: str, quantile: float) -> str:
    """Return a quantile of what a histogram observed lately."""
    return f"histogram_quantile({quantile}, {per_second(f'{histogram}_bucket', 'le')})"


def above_0(query: str) -> str:
    """Return a query without what is 0: most of its labels' values never occur."""
    return f"{query} > 0"


STALENESS: Final = "heterorl_coordinator_group_staleness_versions"
HELD_OUT: Final = "heterorl_coordinator_evaluation_reward_mean"
ERROR: Final = "heterorl_coordinator_evaluation_reward_standard_error"
REWARD: Final = "heterorl_coordinator_step_reward_mean"
FAULTS: Final = "heterorl_coordinator_prompt_faults_total"
ABANDONED: Final = "heterorl_coordinator_abandoned_prompts_total"

RUN_LEARNING: Final = (
    Panel("Reward", "Mean reward of each batch; of the version evaluated last, on held-out prompts; the "
          "goal.",
          {"batch": REWARD, "held out": HELD_OUT, "goal": "vector($goal)"}),
    Panel("Reward on held-out prompts", "Of the version evaluated last, and twice its standard error up and "
          "down.",
          {"reward": HELD_OUT, "low": f"{HELD_OUT} - 2 * {ERROR}", "high": f"{HELD_OUT} + 2 * {ERROR}"}),
    Panel("Time to the goal", "Until a batch's mean reward is the goal, if it goes on rising as in the last "
          "hour; no number: it does not rise.",
          {"left": f"clamp_min($goal - avg_over_time({REWARD}[10m]), 0) / (deriv({REWARD}[1h]) > 0)"},
          SECONDS, Kind.NUMBER),
    Panel("KL divergence", "Per token: from the policies that sampled to the one trained, and from that to "
          "the base model.",
          {"behaviour": "heterorl_coordinator_step_kl_nats",
           "base model": "heterorl_learner_reference_kl_nats"}, NATS),
    Panel("Effective sample size", "Share of the batch that the importance weights leave in effect, and "
          "share that was clipped.",
          {"ESS": "heterorl_coordinator_step_ess_ratio", "clipped": "heterorl_learner_clip_ratio"}, SHARE),
    Panel("Surprisal", "Minus the mean learner logprob; falls to 0 when the policy collapses.",
          {"nats": "heterorl_learner_surprisal_nats"}, NATS),
    Panel("Gradient norm", "Before clipping.", {"norm": "heterorl_learner_gradient_norm"}),
    Panel("Learning rate", "Of each step, by learner.lr_schedule.",
          {"rate": "heterorl_learner_learning_rate"}),
    Panel("Versions", "Made by the learner, signed and stored for upload, announced by the coordinator, on "
          "disk.",
          {"learner": "heterorl_coordinator_learner_version",
           "published": "heterorl_learner_published_version",
           "announced": "heterorl_coordinator_head_version",
           "checkpoint": "heterorl_learner_checkpoint_version"}),
)  # fmt: skip

RUN_COMPLETIONS: Final = (
    Panel("Length of completions", "Tokens, of each batch; at the limit nothing more is graded.",
          {"mean": "heterorl_learner_completion_tokens_mean",
           "95 % are within": "heterorl_learner_completion_tokens_p95",
           "longest": "heterorl_learner_completion_tokens_max",
           "prompts, mean": "heterorl_learner_prompt_tokens_mean"}),
    Panel("Length on held-out prompts", "Mean tokens of a completion; where many are cut at the limit, the "
          "mean says less.",
          {"tokens": "heterorl_coordinator_evaluation_completion_tokens",
           "percent cut": "heterorl_coordinator_evaluation_cut_ratio * 100"}),
    Panel("Cut, and teaching nothing", "Share of completions that ended at the token limit; of groups whose "
          "rewards are all equal; of the newest 64 batches' groups that taught nothing.",
          {"completions cut": "heterorl_learner_cut_ratio",
           "equal rewards": "heterorl_learner_zero_advantage_ratio",
           "taught nothing": "heterorl_learner_uninformative_ratio"}, SHARE),
    Panel("Spread of rewards", "Standard deviation of rewards within a group, mean of each batch.",
          {"deviation": "heterorl_learner_reward_deviation"}),
    Panel("What graders measured", "Means of the newest batch; names and units are the task's own.",
          {"{{name}}": "heterorl_learner_grader_metric"}),
    Panel("Evaluations", "The version evaluated last, the best one, and the prompts that the evaluation "
          "under way waits for.",
          {"evaluated": "heterorl_coordinator_evaluation_version",
           "best": "heterorl_coordinator_evaluation_best_version",
           "prompts waited for": "heterorl_coordinator_evaluation_waiting_prompts",
           "samplers that count": "heterorl_coordinator_evaluation_samplers"}),
)  # fmt: skip

RUN_AGE: Final = (
    Panel("Staleness of trained groups", "Versions between the oldest token of a group and the step that "
          "used it.",
          {"{{le}}": "sum by (le) (increase(heterorl_learner_staleness_versions_bucket[$__rate_interval]))"},
          kind=Kind.HEAT),
    Panel("Staleness", "Half, and 19 of 20, of the groups trained on are at most this late; the bound "
          "beyond which none is taken, and the one beyond which half of the effective sample size may be "
          "lost (no line: not known).",
          {"half": quantile_of(STALENESS, 0.5), "19 of 20": quantile_of(STALENESS, 0.95),
           "bound": "heterorl_coordinator_max_staleness_versions",
           "recommended": "heterorl_learner_recommended_staleness_versions"}),
    Panel("Lag by stage", "Mean seconds a group takes from stage to stage.",
          {"{{stage}}": mean_of("heterorl_coordinator_group_lag_seconds", "stage")}, SECONDS),
    Panel("Drift by age", "KL divergence per token that the age of a token alone makes, as measured; ages "
          "without groups have no line.",
          {"{{age_versions}} versions": "heterorl_learner_drift_nats"}, NATS),
    Panel("Standard error of the drift", "How well the drift at each age is known.",
          {"{{age_versions}} versions": "heterorl_learner_drift_error_nats"}, NATS),
    Panel("Effective sample size by age", "Share that groups of each age are expected to leave in effect, by "
          "the objective's own weights; ages without groups have no line.",
          {"{{age_versions}} versions": "heterorl_learner_expected_ess_ratio"}, SHARE),
    Panel("Truncation", "Share of tokens whose ratio was cut to the ceiling.",
          {"tokens truncated": "heterorl_learner_truncated_ratio"}, SHARE),
)  # fmt: skip

RUN_GROUPS: Final = (
    Panel("What bounds the pace", "1: the learner, the samplers, verifiers, the link, a setting, or nothing "
          "alone; `heterorl-node status` says what to do.",
          {"{{by}} {{setting}}": above_0("heterorl_coordinator_bottleneck")}),
    Panel("Waits", "Share of its time that the learner waits for groups, and that limits, graders and "
          "transfers hold samplers back.",
          {"learner": "heterorl_coordinator_learner_wait_ratio",
           "samplers": "heterorl_coordinator_samplers_held_back_ratio"}, SHARE),
    Panel("Groups by verdict", "What becomes of submitted groups, per second.",
          {"{{verdict}}": per_second("heterorl_coordinator_groups_total", "verdict")}),
    Panel("Slots", "What is in flight: leased, waiting in the spool, accepted and not yet trained on.",
          {"{{state}}": 'heterorl_coordinator_slots{state=~"leased|spooled|accepted"}',
           "in the learner's buffer": "heterorl_learner_buffered_groups"}),
    Panel("Room under each bound", "Groups that may still be leased; the bound at 0 holds samplers back.",
          {"{{bound}}": "heterorl_coordinator_capacity_groups"}),
    Panel("Prompts that fail", "Leases given back because the prompt could not be answered, and prompts "
          "given up, per second.",
          {"given back: {{reason}}": above_0(per_second(FAULTS, "reason")),
           "given up: {{reason}}": above_0(per_second(ABANDONED, "reason"))}),
    Panel("Leases that ended without a group", "Per second.",
          {"leases": per_second("heterorl_coordinator_lease_expiries_total")}),
    Panel("Waiting", "Tasks that wait right now, by what for.",
          {"{{node}}: {{for}}": f"sum by (node, for) (heterorl_node_waiting_tasks{PEERS}) > 0"}),
)  # fmt: skip

RUN_LEARNER: Final = (
    Panel("Step", "Mean seconds: a gradient step, its journal entry, from masters to stored for upload.",
          {"step": mean_of("heterorl_learner_step_seconds"),
           "journal": mean_of("heterorl_learner_journal_seconds"),
           "publish": mean_of("heterorl_learner_publish_seconds")}, SECONDS),
    Panel("Tokens trained on", "Completion tokens of the newest step over its time; and over all time, "
          "waits included.",
          {"while it steps": "heterorl_learner_tokens_per_second",
           "in the mean": per_second("heterorl_learner_trained_tokens_total")}, "suffix: tokens/s"),
    Panel("Tokens read", "In the newest step: positions of the model, padding included, and distinct tokens.",
          {"positions": "heterorl_learner_read_tokens",
           "distinct": "heterorl_learner_distinct_tokens"}),
    Panel("Steps that made no version", "Gradients that were not finite, batches that taught nothing, "
          "versions equal to the one before or superseded, per second.",
          {"not finite": per_second("heterorl_learner_skipped_steps_total"),
           "taught nothing": per_second("heterorl_learner_uninformative_batches_total"),
           "changed nothing": per_second("heterorl_learner_unchanged_versions_total"),
           "superseded": per_second("heterorl_learner_superseded_versions_total")}),
    Panel("Journal", "On disk; at learner.journal_bytes training waits for a checkpoint.",
          {"journal": "heterorl_learner_journal_bytes"}, "bytes"),
    Panel("Checkpoints", "Mean seconds that training waits for the copy, and until it is on disk.",
          {"copy": mean_of("heterorl_learner_checkpoint_copy_seconds"),
           "on disk": mean_of("heterorl_learner_checkpoint_seconds")}, SECONDS),
    Panel("Written down", "Steps per second by what became of them at samples, TensorBoard and Weights & "
          "Biases.",
          {"{{writer}} {{outcome}}": per_second("heterorl_learner_step_writes_total", "writer", "outcome")}),
)  # fmt: skip

RUN_CONTRIBUTORS: Final = (
    Panel("Contributors", "Connected to a learner that merges, and those whose changes are in the newest "
          "merge.",
          {"connected": "heterorl_learner_contributors",
           "in the newest merge": "heterorl_learner_merged_contributions"}),
    Panel("Age of the round", "Seconds since the newest merge, and for whom the next one waits.",
          {"round": "heterorl_learner_round_seconds",
           "waits for {{contributor}}": "heterorl_learner_awaited_seconds"}, SECONDS),
    Panel("Contributions", "Per second, by what became of them; of those refused the groups are dealt again.",
          {"{{contributor}} {{outcome}}":
           above_0(per_second("heterorl_learner_contributions_total", "contributor", "outcome"))}),
    Panel("Bytes of contributions", "Payloads that reach the learner.",
          {"{{contributor}}": per_second("heterorl_learner_contribution_bytes_total", "contributor")}, "Bps"),
    Panel("Norm of changes", "Of each contributor's newest change, and of the mean of the newest merge.",
          {"{{contributor}}": "heterorl_learner_change_norm", "merged": "heterorl_learner_merged_norm"}),
    Panel("Cosine of changes", "Of each contributor's change with the mean of its merge: 1 where all learn "
          "the same, 0 or below where it undoes what the others do.",
          {"{{contributor}}": "heterorl_learner_change_cosine",
           "least": "heterorl_learner_merged_cosine_min"}),
    Panel("Outer rate", "Share of the mean change that a version takes over, and whether merged changes grow "
          "as in divergence.",
          {"rate": "heterorl_learner_outer_rate", "diverges": "heterorl_learner_merges_diverge"}),
    Panel("Time of a contributor", "Mean seconds: a step, coding a change, from a contribution to the words "
          "of the version that has it.",
          {f"{{{{node}}}}, {what}": mean_of(f"heterorl_contributor_{name}_seconds", "node")
           for what, name in (("step", "step"), ("coding", "hand_in"), ("answer", "answer"))}, SECONDS),
)  # fmt: skip

RUN: Final = Dashboard(
    "run",
    "What a run learns, from groups of which age, and what becomes of them.",
    {
        "Learning": RUN_LEARNING,
        "Completions": RUN_COMPLETIONS,
        "Age": RUN_AGE,
        "Groups": RUN_GROUPS,
        "Learner": RUN_LEARNER,
        "Contributors": RUN_CONTRIBUTORS,
    },
)

PRICE: Final = "heterorl_coordinator_peer_price_per_hour"
TOKENS: Final = "heterorl_coordinator_peer_tokens_per_second"
FLEET_TOKENS: Final = "heterorl_coordinator_fleet_tokens_per_second_sum"
TRANSFER: Final = "heterorl_node_transfer_bytes_total"
FLEET_PRICE: Final = "heterorl_coordinator_fleet_price_per_hour_sum"

FLEET_WHO_IS_HERE: Final = (
    Panel("Peers", "By role and state.", {"{{role}} {{state}}": "heterorl_coordinator_peers > 0"}),
    Panel("Tokens", "Completion tokens per second: of all samplers, and of those shown by name.",
          {"all samplers": FLEET_TOKENS, "{{node}}": TOKENS + PEERS}, "suffix: tokens/s"),
    Panel("Held back by operators", "Whether the run is paused, how many samplers are drained, whether a "
          "coordinator leads.",
          {"paused": "heterorl_coordinator_paused",
           "drained samplers": "heterorl_coordinator_drained_samplers",
           "coordinators that lead": "sum(heterorl_coordinator_leads)"}),
    Panel("Silence", "Seconds since a peer's last heartbeat.",
          {"{{node}}": f"heterorl_coordinator_peer_silence_seconds{PEERS}"}, SECONDS),
    Panel("Clock offset", "The coordinator's clock minus a peer's.",
          {"{{node}}": f"heterorl_coordinator_peer_clock_offset_seconds{PEERS}"}, SECONDS, from_zero=False),
)  # fmt: skip

FLEET_COST: Final = (
    Panel("Price", "Of an hour, as sampler.price_per_hour says; samplers without a price are not in the sum.",
          {"all samplers": f"sum({FLEET_PRICE}) > 0", "{{node}}": f"{PRICE}{PEERS} > 0"}),
    Panel("Price of a million tokens", "What a sampler costs for a million completion tokens at its pace "
          "now.",
          {"all samplers": f"sum({FLEET_PRICE}) / 3600 / (sum({FLEET_TOKENS}) / 1e6 > 0) > 0",
           "{{node}}": f"sum by (node) ({PRICE}{PEERS}) / 3600 "
                       f"/ (sum by (node) ({TOKENS}{PEERS}) / 1e6 > 0) > 0"}),
    Panel("Cost", "Of the time shown above: the price of each minute in which a sampler was here.",
          {"all samplers": f"sum(sum_over_time({FLEET_PRICE}[$__range:1m])) / 60 > 0",
           "{{node}}": f"sum by (node) (sum_over_time({PRICE}{PEERS}[$__range:1m])) / 60 > 0"},
          kind=Kind.NUMBER),
)  # fmt: skip

FLEET_SAMPLERS: Final = (
    Panel("Leases", "Worked on, and of these not begun: their prompts are being made or wait for the engine.",
          {"{{node}}": f"heterorl_sampler_running_leases{PEERS}",
           "{{node}}, not begun": f"heterorl_sampler_unbegun_groups{PEERS}"}),
    Panel("Groups at once", "Generated at once, at most: as configured, or as many as fill the engine.",
          {"{{node}}": f"heterorl_sampler_concurrency_groups{PEERS}"}),
    Panel("Engine in use", "Of its memory for keys and values, and completions asked for over those it draws "
          "at once.",
          {"{{node}}, cache": f"heterorl_sampler_engine_cache_ratio{PEERS}",
           "{{node}}, asked for": f"heterorl_sampler_engine_asked_ratio{PEERS}"}, SHARE),
    Panel("Groups to submit", "Graded groups that are not submitted yet.",
          {"{{node}}": f"heterorl_sampler_outbox_groups{PEERS}"}),
    Panel("Age of the policy sampled from", "Seconds since it was published.",
          {"{{node}}": f"heterorl_sampler_policy_age_seconds{PEERS}"}, SECONDS),
    Panel("Starving", "For how long newer versions have been there and none was taken.",
          {"{{node}}": f"heterorl_coordinator_peer_starving_seconds{PEERS}",
           "quantile {{quantile}}": 'heterorl_coordinator_fleet_starving_seconds{quantile=~"0.9|1"}'},
          SECONDS),
    Panel("Graders", "Prompts, replies and gradings that wait for a process.",
          {"{{node}}": f"heterorl_sampler_grader_queue_requests{PEERS}"}),
    Panel("What was dropped", "Leased groups that were not submitted, per second, by reason.",
          {"{{reason}}": per_second(f"heterorl_sampler_dropped_groups_total{PEERS}", "reason")}),
    Panel("Engines", "Times an engine was loaded again, a held policy was found damaged, or a version drew "
          "no finite logprob, per second.",
          {"restarts": per_second(f"heterorl_sampler_engine_restarts_total{PEERS}"),
           "repairs": per_second(f"heterorl_sampler_repairs_total{PEERS}"),
           "probes failed": per_second(f"heterorl_sampler_probe_failures_total{PEERS}")}),
    Panel("Grader outages", "Attempts to grade that failed through no fault of the prompt, per second.",
          {"{{reason}}": per_second(f"heterorl_sampler_grader_outages_total{PEERS}", "reason"),
           "processes killed": per_second(f"heterorl_sampler_grader_kills_total{PEERS}")}),
)  # fmt: skip

FLEET_WEIGHTS: Final = (
    Panel("Version lag", "Head minus the version a sampler holds: the fleet's quantiles, and peers by name.",
          {"{{node}}": f"heterorl_coordinator_peer_version_lag_versions{PEERS}",
           "quantile {{quantile}}": 'heterorl_coordinator_fleet_version_lag_versions{quantile=~"0.5|0.9"}'}),
    Panel("Lag", "Seconds since a version newer than a sampler's was announced: the fleet's quantiles, and "
          "peers by name.",
          {"{{node}}": f"heterorl_coordinator_peer_lag_seconds{PEERS}",
           "quantile {{quantile}}": 'heterorl_coordinator_fleet_lag_seconds{quantile=~"0.5|0.9"}'}, SECONDS),
    Panel("Bytes", "Payload of policy versions, by who moves it; without a name: the coordinator.",
          {"{{node}} {{kind}} {{direction}}": per_second(TRANSFER + PEERS, "node", "kind", "direction")},
          "Bps"),
    Panel("Fetch", "Mean seconds from the first byte asked for to the last frame verified.",
          {"{{node}} {{kind}}": mean_of("heterorl_node_fetch_seconds", "node", "kind", of=PEERS)}, SECONDS),
    Panel("Swap", "Mean seconds generation pauses to load a version.",
          {"{{node}}": mean_of("heterorl_sampler_swap_seconds", "node", of=PEERS)}, SECONDS),
    Panel("Fetches that ended without a version", "Per second, by reason.",
          {"{{reason}}": per_second(f"heterorl_sampler_dropped_fetches_total{PEERS}", "reason")}),
)  # fmt: skip

FLEET_HUBS: Final = (
    Panel("Ledger", "Mean seconds until a commit was on disk.",
          {"commit": mean_of("heterorl_coordinator_ledger_transaction_seconds")}, SECONDS),
    Panel("Requests", "Waiting for their turn at the ledger, and sent away undecided, per second.",
          {"wait": "heterorl_coordinator_waiting_requests",
           "sent away: {{cause}}": per_second("heterorl_coordinator_dropped_decisions_total", "cause")}),
    Panel("Heartbeats", "Mean time between two of a sampler.",
          {"heartbeats": "heterorl_coordinator_heartbeat_pause_seconds"}, SECONDS),
    Panel("Groups on disk", "Bytes that wait for training.",
          {"coordinator": "heterorl_coordinator_spooled_bytes"}, "bytes"),
    Panel("Relays", "Connections that each passes on to the coordinator or serves itself, and its limit.",
          {"{{node}}, to {{to}}": "heterorl_relay_connections",
           "{{node}}, limit": "heterorl_relay_connection_limit"}),
    Panel("Buckets", "Artifacts that a hub serves and that are not in its bucket yet.",
          {"{{node}}": "heterorl_node_bucket_missing_artifacts"}),
)  # fmt: skip

FLEET_WHAT_RUNS_OUT: Final = (
    Panel("Free disk", "Share of the file system of node.state_dir.",
          {"the coordinator": 'heterorl_node_disk_free_ratio{node=""}',
           "{{node}}": "heterorl_coordinator_peer_disk_free_ratio"}, SHARE),
    Panel("Open files", "As a share of the limit; hubs close connections above it.",
          {"{{node}}": "heterorl_node_descriptors_used_ratio"}, SHARE),
    Panel("Days until certificates expire", "The first to expire of each kind; authority is the run's.",
          {"{{certificate}}": "min by (certificate) (heterorl_node_certificate_expiry_seconds) / 86400",
           "{{role}}": "min by (role) (heterorl_coordinator_peer_certificate_expiry_seconds) / 86400"}),
)  # fmt: skip

FLEET: Final = Dashboard(
    "fleet",
    "Who takes part in a run: how fast, how far behind, at what cost, and what runs out.",
    {
        "Who is here": FLEET_WHO_IS_HERE,
        "Cost": FLEET_COST,
        "Samplers": FLEET_SAMPLERS,
        "Weights": FLEET_WEIGHTS,
        "Hubs": FLEET_HUBS,
        "What runs out": FLEET_WHAT_RUNS_OUT,
    },
)

REFUSALS: Final = "heterorl_node_refusals_total"
MISMATCH: Final = "heterorl_learner_sampler_mismatch"

TRUST_REWARDS: Final = (
    Panel("Checks of rewards", "Groups that were drawn for a check, per second, by outcome; late: it waits; "
          "passed over: delivered, and checked afterwards.",
          {"{{outcome}}": per_second("heterorl_coordinator_reward_checks_total", "outcome")}),
    Panel("Verifiers and liars", "Verifiers that check now; samplers proved to lie since the coordinator "
          "started; groups thrown out.",
          {"verifiers": "heterorl_coordinator_verifiers",
           "proven liars": "heterorl_coordinator_proven_liars_total",
           "groups thrown out": "heterorl_coordinator_thrown_out_groups_total"}),
    Panel("Check", "Mean seconds of a verifier for a group; groups that wait for its graders, and that were "
          "delivered and are checked afterwards; samplers checked less than the run asks for.",
          {"{{node}}, seconds": mean_of("heterorl_verifier_check_seconds", "node"),
           "{{node}}, groups waiting": "heterorl_verifier_grader_queue_requests",
           "groups checked afterwards": "heterorl_coordinator_owed_checks_groups",
           "samplers thinly checked": "heterorl_coordinator_thinly_checked_samplers"}),
    Panel("Samplers by standing", "Newcomers have delivered nothing yet; hoards, failing and quarantined "
          "ones get few leases.",
          {"{{standing}}": "heterorl_coordinator_sampler_standings > 0"}),
    Panel("Groups of newcomers that wait", "Held back because samplers with hardly a checked reward fill "
          "their part of the batches.",
          {"groups": "heterorl_coordinator_newcomers_waiting_groups"}),
)  # fmt: skip

TRUST_LOGPROBS_AND_PROMPTS: Final = (
    Panel("Mismatch by sampler", "KL to the learner's policy that age does not explain; at "
          "learner.quarantine_mismatch_nats its groups are refused.",
          {"{{sampler}}": f"{MISMATCH}_nats"}, NATS),
    Panel("Standard error of the mismatch", "How well each is known; 10: not at all.",
          {"{{sampler}}": f"{MISMATCH}_error_nats"}, NATS),
    Panel("Samplers that nobody compares with", "None of them is quarantined.",
          {"samplers": "heterorl_learner_unmeasured_samplers"}),
    Panel("Clamped tokens", "Per second: the learner finds them e^20 times as likely as their sampler said.",
          {"tokens": per_second("heterorl_learner_clamped_tokens_total")}),
    Panel("Grader code", "Different ones among the samplers present; groups refused for their options or "
          "grader, per second.",
          {"grader codes": "heterorl_coordinator_grader_digests",
           "refused: {{what}}": per_second("heterorl_coordinator_misgraded_groups_total", "what")}),
)  # fmt: skip

TRUST_THE_WIRE: Final = (
    Panel("Refusals", "By who refused and why, per second.",
          {"{{service}} {{reason}}": above_0(per_second(REFUSALS, "service", "reason"))}),
    Panel("Sources of weights set aside", "By what they did, per second; lied: against a signed manifest.",
          {"{{fault}}": per_second("heterorl_node_source_faults_total", "fault")}),
    Panel("Lies told to peers", "What hubs sent that the learner had not signed, since each peer's start.",
          {"{{node}}": above_0("heterorl_coordinator_peer_source_lies")}),
    Panel("Damaged weights", "Frames with a digest that was not signed, per second; frames that went bad in "
          "a peer's memory, since its start.",
          {"in flight": per_second("heterorl_node_frames_damaged_total"),
           "in memory of {{node}}": above_0("heterorl_coordinator_peer_mended_frames")}),
    Panel("Twins", "Processes refused because another of their name was here, per second.",
          {"twins": per_second("heterorl_coordinator_refused_twins_total")}),
    Panel("Damaged groups", "Groups whose bytes the coordinator's disk changed, since it started.",
          {"damaged": "heterorl_coordinator_damaged_groups_total"}),
)  # fmt: skip

TRUST_THE_LEDGER: Final = (
    Panel("Must stay 0", "Groups trained on twice, unknown to the ledger, or delivered again after a step.",
          {"trained on twice": "heterorl_coordinator_double_trainings_total",
           "unknown": "heterorl_coordinator_unknown_trainings_total",
           "delivered again": "heterorl_coordinator_doubled_deliveries_total",
           "delivered again, by the learner": "heterorl_learner_doubled_groups_total"}),
    Panel("Whole", "1 once the learner has found that the ledger lacks nothing; behind: it lacks something, "
          "and nothing is leased.",
          {"confirmed": "heterorl_coordinator_ledger_confirmed",
           "behind": "heterorl_coordinator_ledger_behind"}),
    Panel("Commits that failed", "Since the coordinator started: it went back to what the ledger holds.",
          {"commits": "heterorl_coordinator_undone_batches_total"}),
)  # fmt: skip

TRUST: Final = Dashboard(
    "trust",
    "What was checked, what was refused and found damaged, and what must stay 0.",
    {
        "Rewards": TRUST_REWARDS,
        "Logprobs and prompts": TRUST_LOGPROBS_AND_PROMPTS,
        "The wire": TRUST_THE_WIRE,
        "The ledger": TRUST_THE_LEDGER,
    },
)

DASHBOARDS: Final = (RUN, FLEET, TRUST)
