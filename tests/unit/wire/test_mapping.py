import math
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import Message

from bench.role_on_wire import role_to_wire
from heterorl.v1 import common_pb2, membership_pb2, policy_pb2, rollout_pb2
from node.errors import Reason, RefusedError
from node.identity.revocation import Revocations
from node.values import limits
from node.values.bottleneck import Bottleneck
from node.values.evaluation import Evaluation, EvaluationStatus
from node.values.groups.failure import FAULTS, BadPrompt, FailedLease, Failure
from node.values.groups.rollout import LeaseGrant, LeasePurpose, PromptLease
from node.values.groups.verdict import GroupVerdict, Verdict
from node.values.peer_figures import MachineFigures, SamplerFigures
from node.values.policy import Announcement, Artifact, ArtifactKey, PolicyVersion
from node.values.roles import Role
from node.values.run import (
    Headline,
    PeerCount,
    PeerQuery,
    PeerStatus,
    RecommendedStaleness,
    RunSettings,
    RunStatus,
    StepRecord,
    StepReport,
    Teaching,
    Unusual,
)
from node.wire.mapping import from_wire, known, member_from_wire, to_wire, verdict_to_wire
from support.groups import SAMPLING
from support.refusals import refused

VERSION = PolicyVersion(3, b"r" * 16)
STEP = StepReport(3, 0.5, 1.5, 4, 0.01, 0.9, 0.1, 1.2, 0.3, 2.2, grader_metrics={"words": 2.5})
SETTINGS = RunSettings("addition", 8, 4, 16, 2.0, None, SAMPLING, '{"level": 3}', prompts=100)
LEASE = PromptLease("3.1", "addition", 7, 1, SAMPLING, 60.0, row=b'{"n": 7}')
ANNOUNCEMENT = Announcement(
    VERSION, 2, 12.5, artifacts=(Artifact(ArtifactKey(3, 1), 10), Artifact(ArtifactKey(3), 100))
)
EVALUATION = Evaluation(
    version=10,
    first_prompt=84,
    prompts=16,
    completions=4,
    temperature=0.5,
    max_new_tokens=64,
    started_at_s=1.5,
    finished_at_s=2.5,
    counted_prompts=15,
    reward_mean=0.25,
    reward_standard_error=0.125,
    cut_ratio=0.5,
    tokens_mean=31.5,
    sampling='{"top_p": 0.5}',
    metrics='{"words": 2.5}',
    answers=30,
    samplers=3,
)
PEER = PeerStatus(
    node_id="s1",
    role=Role.SAMPLER,
    state="live",
    held=VERSION,
    version_lag_versions=2,
    lag_s=1.5,
    last_seen_s=0.1,
    clock_offset_s=-3.0,
    waits_for="",
    verdicts={"trained": 4},
    staleness_mean_versions=2.5,
    joins=1,
    refused_twins=3,
    refused_twin_s=5.5,
    grader_digest=b"g" * 16,
    leases=9,
    lease_allowance=12,
    oldest_lease_s=3.5,
    standing="hoards",
    standing_detail="holds 9",
    software_version="0.3.0",
    protocol=2,
    machine=MachineFigures(0.5, certificate_expiry_s=9.5, mended_frames=1),
    sampler=SamplerFigures(starving_s=2.5),
)
STATUS = RunStatus(
    run_id="run",
    head=VERSION,
    learner_epoch=1,
    peers=(PEER, replace(PEER, node_id="s2", held=None, waits_for="policy version", verdicts={})),
    slots={"leased": 2},
    verdicts={"trained": 4},
    step=None,
    capacity_groups=12,
    capacity_bound="staleness",
    now_s=99.5,
    ledger_gap="lacks steps",
    prompts=100,
    bad_prompts=(BadPrompt(7, Failure.PROMPT_FAILED, "raised", 2, 30, 1.5, ("s1", "s2"), 601.5),),
    bad_prompts_total=3,
    evaluation=EvaluationStatus(first=EVALUATION, under_way=replace(EVALUATION, version=20), best_by="exact"),
    max_staleness_versions=8,
    bad_prompt_reasons={"prompt_failed": 3},
    exportable_best=0,
    matching_peers=2000,
    peer_counts=(PeerCount(Role.SAMPLER, "live", 1999), PeerCount(Role.RELAY, "silent", 1)),
    headline=Headline("training", "groups: 3 of 8 are ready", 2.5),
    unusual=(Unusual("relay silent", 1, ("r1",)),),
)
QUERY = PeerQuery(
    ("live",), ("sampler",), ("hoards",), "s", "disk", "lag", is_reversed=True, offset=50, limit=10
)
SURVIVORS: list[tuple[type[Message], Any]] = [
    (policy_pb2.WatchVersionsResponse, ANNOUNCEMENT),
    (membership_pb2.JoinResponse, SETTINGS),
    (membership_pb2.JoinResponse, replace(SETTINGS, head=VERSION)),
    (membership_pb2.GetStatusResponse, STATUS),
    (membership_pb2.GetStatusResponse, replace(STATUS, headline=None)),
    (
        membership_pb2.GetStatusResponse,
        replace(STATUS, bottleneck=Bottleneck("setting", "it waited", "Raise it.", "a.key", 0.25, 0.5)),
    ),
    (membership_pb2.PeerQuery, QUERY),
    (membership_pb2.PeerQuery, PeerQuery()),
    (membership_pb2.GetStatusResponse, replace(STATUS, step=STEP, teaching=Teaching(3, 1, 0.5, 2.5))),
    (membership_pb2.StepReport, replace(STEP, groups_wait_s=0.0)),
    *(
        (membership_pb2.StepReport, replace(STEP, recommended_staleness=recommended))
        for recommended in (
            RecommendedStaleness(0, "token weights"),
            RecommendedStaleness(None, "token weights", "nothing is measured"),
        )
    ),
    (membership_pb2.Revocations, Revocations()),
    (membership_pb2.Revocations, Revocations(("s1", "s2"))),
    *((membership_pb2.GroupVerdict, GroupVerdict("3.1", verdict, "why")) for verdict in Verdict),
    *((rollout_pb2.FailedLease, FailedLease("3.1", fault, "why")) for fault in sorted(FAULTS)),
    *(
        (rollout_pb2.LeasePromptsResponse, LeaseGrant((replace(LEASE, purpose=purpose),), 0.5, "staleness"))
        for purpose in LeasePurpose
    ),
    (rollout_pb2.PromptLease, replace(LEASE, policy_version=0)),
    (rollout_pb2.StepRecord, StepRecord(4, ("3.1", "5.2"), (0, 2))),
    (rollout_pb2.StepRecord, StepRecord(4, (), (), restored_version=0)),
]


@pytest.mark.parametrize(("message_type", "value"), SURVIVORS, ids=lambda part: getattr(part, "__name__", ""))
def test_a_value_survives_the_wire(message_type: type[Message], value: Any) -> None:
    message = message_type.FromString(to_wire(message_type, value).SerializeToString())
    assert from_wire(type(value), message) == value


TOO_MANY = {f"metric{n}": 1.0 for n in range(limits.GROUP_METRICS + 1)}

REFUSED: list[tuple[type[Message], Any, str]] = [
    *(
        (policy_pb2.ArtifactKey, key, "no artifact makes version")
        for key in (ArtifactKey(-1), ArtifactKey(3, 3), ArtifactKey(3, 4), ArtifactKey(3, -2))
    ),
    (policy_pb2.Artifact, Artifact(ArtifactKey(3), -1), "negative size"),
    (common_pb2.PolicyVersion, PolicyVersion(-1), "policy version -1"),
    (common_pb2.PolicyVersion, PolicyVersion(1, b"short"), "a root of 5 bytes"),
    (membership_pb2.JoinResponse, replace(SETTINGS, group_size=0), "group_size=0"),
    (membership_pb2.JoinResponse, replace(SETTINGS, heartbeat_interval_s=float("nan")), "interval_s=nan"),
    (
        membership_pb2.JoinResponse,
        replace(SETTINGS, task_options_json=" " * (limits.TASK_OPTIONS_BYTES + 1)),
        "task options of 65537 bytes",
    ),
    (membership_pb2.StepReport, replace(STEP, version=-1), "step -1"),
    (membership_pb2.StepReport, replace(STEP, grader_metrics=TOO_MANY), "17 grader metrics"),
    (membership_pb2.StepReport, replace(STEP, groups_wait_s=-1.0), "-1.0 s"),
    (membership_pb2.StepReport, replace(STEP, groups_wait_s=math.nan), "nan s"),
    (membership_pb2.Revocations, Revocations(("s",) * (limits.REVOCATIONS + 1)), "16385 revocations"),
    *(
        (membership_pb2.Revocations, Revocations(node_ids), "sorted order")
        for node_ids in (("s2", "s1"), ("s1", "s1"), ("S1",), ("",))
    ),
    (rollout_pb2.PromptLease, replace(LEASE, row=b"x" * (limits.ROW_BYTES + 1)), "a row of 262145 bytes"),
    (rollout_pb2.PromptLease, replace(LEASE, group_size=0), "0 completions"),
    (rollout_pb2.StepRecord, StepRecord(4, ("3.1",), ()), "1 groups and 0 stalenesses"),
    (rollout_pb2.StepRecord, StepRecord(4, ("3.1",), (0,), 2), "version 4 from 2 with 1 groups"),
    (rollout_pb2.StepRecord, StepRecord(4, (), (), 4), "version 4 from 4 with 0 groups"),
    *(
        (common_pb2.SamplingParameters, replace(SAMPLING, **wrong), next(iter(wrong)))
        for wrong in (
            {"temperature": 0.0},
            {"temperature": float("nan")},
            {"top_p": 1.5},
            {"top_k": -1},
            {"max_new_tokens": 0},
            {"min_p": -0.1},
            {"min_p": 1.1},
            {"min_p": float("nan")},
            {"stop": ("",)},
            {"stop": ("x" * 65,)},
            {"stop": ("x",) * 17},
        )
    ),
]


@pytest.mark.parametrize(("message_type", "value", "why"), REFUSED)
def test_what_cannot_be_meant_is_refused(message_type: type[Message], value: Any, why: str) -> None:
    with pytest.raises(RefusedError, match=why):
        from_wire(type(value), to_wire(message_type, value))


def test_a_part_of_a_message_is_checked_like_the_whole() -> None:
    grant = LeaseGrant((replace(LEASE, sampling=replace(SAMPLING, top_k=-1)),), 0.5, "")
    with refused(Reason.MALFORMED, "top_k=-1"):
        from_wire(LeaseGrant, to_wire(rollout_pb2.LeasePromptsResponse, grant))


def test_an_enum_value_of_a_later_version_is_refused() -> None:
    with refused(Reason.MALFORMED, "77"):
        member_from_wire(Role, membership_pb2.JoinRequest.FromString(b"\x10\x4d"), "role")
    with refused(Reason.MALFORMED, "99"):
        from_wire(GroupVerdict, rollout_pb2.GroupJudgement.FromString(b"\x10\x63"))
    with refused(Reason.MALFORMED, "purpose 0"):
        from_wire(PromptLease, rollout_pb2.PromptLease(lease_id="1.1", group_size=1, sampling=SAMPLING_WIRE))
    with refused(Reason.MALFORMED, "'boredom'"):
        from_wire(BadPrompt, membership_pb2.BadPrompt(reason="boredom"))


def test_what_is_only_told_may_be_of_a_later_version() -> None:
    now, later = (membership_pb2.GroupVerdict(group_id="1.1", verdict=n) for n in (8, 99))  # type: ignore[arg-type]
    assert known(Verdict, [now, later], "verdict") == (now,)


SAMPLING_WIRE = to_wire(common_pb2.SamplingParameters, SAMPLING)


def test_every_role_and_verdict_has_a_number() -> None:
    for role in Role:
        assert member_from_wire(Role, membership_pb2.JoinRequest(role=role_to_wire(role)), "role") is role
    for verdict in Verdict:
        response = rollout_pb2.SubmissionAnswer(verdict=verdict_to_wire(verdict))
        assert member_from_wire(Verdict, response, "verdict") is verdict
