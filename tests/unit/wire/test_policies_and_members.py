from dataclasses import replace

import pytest

from heterorl.v1 import membership_pb2
from node import limits
from node.errors import RefusedError
from node.failure import BadPrompt, Failure
from node.identity.revocation import Revocations
from node.policy import Announcement, Artifact, ArtifactKey, PolicyVersion
from node.run import (
    Evaluation,
    EvaluationStatus,
    PeerStatus,
    RecommendedStaleness,
    Role,
    RunSettings,
    RunStatus,
    StepReport,
)
from node.telemetry.metrics import MetricFamily, MetricSample
from node.wire.members import (
    metric_families_from_wire,
    metric_families_to_wire,
    revocations_from_wire,
    revocations_to_wire,
    role_from_wire,
    run_status_from_wire,
    run_status_to_wire,
    settings_from_wire,
    settings_to_wire,
)
from node.wire.policies import (
    announcement_from_wire,
    announcement_to_wire,
    artifact_key_from_wire,
    artifact_key_to_wire,
    policy_version_from_wire,
    policy_version_to_wire,
)
from support.groups import SAMPLING

VERSION = PolicyVersion(3, b"r" * 16)
STEP = StepReport(3, 0.5, 1.5, 4, 0.01, 0.9, 0.1, 1.2, 0.3, 2.2, grader_metrics={"words": 2.5})


def test_an_announcement_survives_the_wire() -> None:
    announcement = Announcement(
        head=VERSION,
        learner_epoch=2,
        published_at_s=12.5,
        artifacts=(Artifact(ArtifactKey(3, 1), 10), Artifact(ArtifactKey(3), 100)),
    )
    assert announcement_from_wire(announcement_to_wire(announcement)) == announcement


@pytest.mark.parametrize("key", [ArtifactKey(-1), ArtifactKey(3, 3), ArtifactKey(3, 4), ArtifactKey(3, -2)])
def test_an_artifact_that_goes_nowhere_is_refused(key: ArtifactKey) -> None:
    with pytest.raises(RefusedError, match="no artifact makes version"):
        artifact_key_from_wire(artifact_key_to_wire(key))


@pytest.mark.parametrize("version", [PolicyVersion(-1), PolicyVersion(1, b"short")])
def test_a_version_that_cannot_exist_is_refused(version: PolicyVersion) -> None:
    with pytest.raises(RefusedError):
        policy_version_from_wire(policy_version_to_wire(version))


@pytest.mark.parametrize("head", [None, VERSION])
def test_settings_survive_the_wire(head: PolicyVersion | None) -> None:
    settings = RunSettings("addition", 8, 4, 16, 2.0, head, SAMPLING, '{"level": 3}', prompts=100)
    assert settings_from_wire(settings_to_wire(settings)) == settings


def test_task_options_over_the_limit_are_refused() -> None:
    settings = RunSettings("addition", 8, 4, 16, 2.0, None, SAMPLING, " " * (limits.TASK_OPTIONS_BYTES + 1))
    with pytest.raises(RefusedError, match="task options of 65537 bytes"):
        settings_from_wire(settings_to_wire(settings))


EVALUATION = Evaluation(
    10,
    84,
    16,
    4,
    0.5,
    64,
    1.5,
    2.5,
    15,
    1,
    0.25,
    0.125,
    0.5,
    31.5,
    '{"top_p": 0.5}',
    '{"words": 2.5}',
    30,
    3,
    "s4",
    "s1, s2",
)


RECOMMENDED = (
    None,
    RecommendedStaleness(0, "token weights"),
    RecommendedStaleness(70, "whole completions"),
    RecommendedStaleness(None, "token weights", "nothing is measured"),
)


@pytest.mark.parametrize("step", [None, *(replace(STEP, recommended_staleness=one) for one in RECOMMENDED)])
def test_the_state_of_a_run_survives_the_wire(step: StepReport | None) -> None:
    peer = PeerStatus(
        "s1",
        Role.SAMPLER,
        "live",
        VERSION,
        2,
        1.5,
        0.1,
        -3.0,
        "",
        {"trained": 4},
        2.5,
        1,
        3,
        5.5,
        grader_digest=b"g" * 16,
        leases=9,
        lease_allowance=12,
        oldest_lease_s=3.5,
        standing="hoards",
        standing_detail="holds 9",
    )
    newcomer = PeerStatus("s2", Role.SAMPLER, "joined", None, 0, 0, 0, 0, "policy version", {}, 0, 1, 0, 0.0)
    status = RunStatus(
        "run",
        VERSION,
        1,
        (peer, newcomer),
        {"leased": 2},
        {"trained": 4},
        step,
        12,
        "staleness",
        99.5,
        "lacks steps",
        100,
        (BadPrompt(7, Failure.PROMPT_FAILED, "raised", 2, 30, 1.5, ("s1", "s2"), 601.5),),
        3,
        EvaluationStatus(
            first=EVALUATION, under_way=Evaluation(20, 84, 16, 4, 0.5, 64, 3.5), best_by="exact"
        ),
        max_staleness_versions=8,
        bad_prompt_reasons={"prompt_failed": 3},
        task_dispute="100 or 90",
        exportable_best=0,
    )
    assert run_status_from_wire(run_status_to_wire(status)) == status


def test_metrics_survive_the_wire() -> None:
    sample = MetricSample("heterorl_sampler_tokens_total", {"kind": "a"}, 2.0)
    family = MetricFamily("heterorl_sampler_tokens", "counter", "Tokens.", (sample,))
    assert metric_families_from_wire(metric_families_to_wire([family])) == (family,)


def test_a_heartbeat_with_too_many_metrics_is_refused() -> None:
    with pytest.raises(RefusedError, match="1001 metric families"):
        metric_families_from_wire([membership_pb2.MetricFamily()] * 1001)


def test_a_role_of_a_later_version_is_refused() -> None:
    with pytest.raises(RefusedError, match="role 77"):
        role_from_wire(membership_pb2.JoinRequest.FromString(b"\x10\x4d").role)


def test_revocations_survive_the_wire() -> None:
    for revocations in (Revocations(), Revocations(("s1", "s2"))):
        assert revocations_from_wire(revocations_to_wire(revocations)) == revocations


@pytest.mark.parametrize(
    "node_ids", [["s2", "s1"], ["s1", "s1"], ["S1"], [""], ["s"] * (limits.REVOCATIONS + 1)]
)
def test_revocations_that_are_no_sorted_node_ids_are_refused(node_ids: list[str]) -> None:
    with pytest.raises(RefusedError):
        revocations_from_wire(membership_pb2.Revocations(node_ids=node_ids))
