"""Hard limits on what a peer may send, checked before memory is spent on it.

Each is far above honest use and far below what harms a small machine. They are part of the protocol, not
settings: two peers with different limits would lose work silently.
"""

from typing import Final

TOKEN_BYTES: Final = 4096
SIGNING_REQUEST_BYTES: Final = 4096

ROLLOUT_MESSAGE_BYTES: Final = 72 << 20
"""One group of 4 Mi tokens is 64 MiB of columns, its prompt 4 MiB. A run's own groups are smaller: see
``largest_group_bytes``."""

MESSAGE_BYTES: Final = {
    "EnrolmentService": TOKEN_BYTES + SIGNING_REQUEST_BYTES + 1024,  # the only one that strangers may call
    "MergeService": ROLLOUT_MESSAGE_BYTES,  # groups for contributors
    "MembershipService": 4 << 20,  # a heartbeat with 10 000 metric samples is about 1 MiB
    "ModelService": 6 << 20,  # as PolicyService: a list, and chunks of 1 MiB
    "PolicyService": 6 << 20,  # a manifest and its envelope; chunks are 1 MiB
    "RolloutService": ROLLOUT_MESSAGE_BYTES,
}
"""Largest message of each service, in either direction. gRPC has one limit per server only."""

SUBMISSION_HEADER_BYTES: Final = 8 << 10
"""Room for the rest of a submitted group: ids, and a certificate and a signature of release 0.3."""

GROUPS_PER_REQUEST: Final = 8
"""Groups that wait at a sampler and are submitted in one request: each pays an eighth of what a message costs
in gRPC. With more, those in flight would be too few requests to read some while others are written."""

JOINED_GROUPS_BYTES: Final = 1 << 20
"""Several groups in one request together; a larger group travels alone, and gains nothing from company."""

CHUNK_BYTES: Final = 1 << 20
"""Part of a frame on the wire: larger chunks are hardly faster."""

BATCH_BYTES: Final = 64 << 10
"""Payloads of small frames travel together up to about this size: few messages, and the part of a delta that
has arrived is applied while the rest is in flight."""

PUSH_BYTES: Final = 8 << 20
"""Most payload bytes sent without a request: what a link of 400 Mbit/s carries in a round trip of 150 ms. No
more is wasted if the receiver planned otherwise."""

DIRECT_BYTES: Final = 64 << 10
"""Payload bytes that a hub with a bucket still sends without a request: they arrive before a peer could have
asked for an address."""

FRAME_WORDS: Final = 1 << 20
"""Words of a full frame; smaller frames cost 7-17 % more bytes."""

MANIFEST_BYTES: Final = 4 << 20
"""A manifest of FRAMES_PER_ARTIFACT frames, or 210 GB of bf16 weights, has 2.8 MB."""

FRAMES_PER_ARTIFACT: Final = 100_000
FRAMES_PER_FETCH: Final = 4096
ARTIFACTS_PER_ANNOUNCEMENT: Final = 4096

GROUP_COMPLETIONS: Final = 1024
PROMPT_TOKENS: Final = 1 << 20
GROUP_TOKENS: Final = 4 << 20
LOG_DENSITY: Final = 30.0
"""Largest log-density of a real action, nats: a narrow one of ours stays below 15."""
GROUP_METRICS: Final = 16
REWARD: Final = 1e6
"""Largest magnitude of a reward: an advantage is a difference of rewards, and above this float32, as rewards
travel, no longer holds one of 0.1. One reward of 1e30 would be the mean of every status and plot.
Times the largest weight (e^20), squared in a gradient norm, it stays within float32."""
METRIC_VALUE: Final = 1e12
"""Largest magnitude of what a grader measures besides: bytes and microseconds fit."""
STAMP_S: Final = 1e11
"""Largest timestamp, Unix seconds: the year 5138."""
METRIC_NAME_PATTERN: Final = r"[a-z0-9_]{1,64}"
"""Names of what a grader measures besides the reward."""

VERSIONS: Final = 1 << 40
"""More policy versions than a run makes in a thousand years."""

LEAST_TEMPERATURE: Final = 0.01
LARGEST_TEMPERATURE: Final = 2.0
"""vLLM samples at 0.01 instead of less, and refuses requests with more than 2."""

STOP_STRINGS: Final = 16
STOP_STRING_CHARACTERS: Final = 64

ROW_BYTES: Final = 256 << 10
"""A row of a data set, as JSON: a prompt of 50 000 words."""

LEASED_ROWS_BYTES: Final = 4 << 20
"""Rows in one answer to a request for leases: seven seconds at 5 Mbit/s."""

TASK_OPTIONS_BYTES: Final = 64 << 10
"""Options of the run's task, as JSON."""

TRAINED_RUNS: Final = 4095
"""Runs of slots that a learner tells of; of more it has joined the oldest, which no ledger knows."""
LEASES_PER_REQUEST: Final = 256
LEASES_PER_PEER: Final = 4096
CHANGES_PER_HEARTBEAT: Final = 8
"""Lines on what an operator has changed in a learner."""
PROBE_S: Final = 300.0
"""Least time between two groups of a sampler that is quarantined: so few that what they train is nothing."""
VERDICTS_PER_HEARTBEAT: Final = 4096

REVOCATIONS: Final = 16_384
"""Node ids shut out of a run: 1 MiB in the heartbeat that carries a change to a relay."""

NAME_PATTERN: Final = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
"""Run ids and node ids are DNS labels, so that they fit host names, file names and certificates."""
