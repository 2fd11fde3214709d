"""Contributors' streams: contributions that come once, again or too early, and hellos while one is unread."""

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from learner.merging.contribution import Contributed, ContributionReport
from learner.merging.contributor_streams import ContributorStreams
from learner.merging.deals import DealRules, Deals
from learner.merging.merge_metrics import MergeMetrics
from learner.step_log import TrainedGroup
from node.errors import Reason
from node.serving.merge_servicer import ContributorStream
from node.telemetry.metric_factory import MetricFactory
from node.values.contribution import Contribution, ContributionAnswer, MergeTerms
from support.clock import ManualClock
from support.groups import make_group
from support.refusals import refused

RULES = DealRules(
    batch_groups=2,
    local_steps=1,
    capacity_groups=8,
    member_timeout_s=60.0,
    quorum=1.0,
    max_staleness_versions=1,
    restart_wait_s=0.0,
)
IDS = ["1.1", "2.1"]
LIMIT = 100
TERMS = MergeTerms(b"{}", b"{}", 2)
REPORT = ContributionReport((), tuple(TrainedGroup(one, "sampler", 0) for one in IDS))
FIRST = Contribution.of(1, 0, REPORT.to_json(), b"")


def made() -> tuple[ContributorStreams, Deals]:
    deals = Deals(RULES, now=0.0)
    streams = ContributorStreams(
        deals,
        TERMS,
        was_trained=lambda _: False,
        merged=(),
        payload_limit=LIMIT,
        wake=lambda: None,
        clock=ManualClock(),
        metrics=MergeMetrics(MetricFactory(CollectorRegistry(), "learner")),
    )
    return streams, deals


def sent(streams: ContributorStreams, deals: Deals) -> ContributorStream:
    """Connect a contributor that has four groups, and has sent two in a contribution nobody has read."""
    stream = ContributorStream()
    streams.open("a", stream, ())
    deals.deal("a", [make_group(one) for one in (*IDS, "3.1", "4.1")])
    streams.hand_in("a", FIRST)
    return stream


def test_a_process_that_starts_again_waits_until_its_contribution_of_before_is_read() -> None:
    streams, deals = made()
    streams.close("a", sent(streams, deals))
    with refused(Reason.BUSY, "contribution 1 of a"):
        streams.open("a", ContributorStream(), ())
    assert deals.objection("a", IDS) == ""
    deals.hand_in("a", IDS)
    streams.open("a", ContributorStream(), ())
    assert [group.group_id for group in streams.returned] == ["3.1", "4.1"]
    assert list(deals.handed_in("a")) == IDS


def test_a_process_that_only_lost_its_stream_is_let_in_at_once() -> None:
    streams, deals = made()
    sent(streams, deals)
    streams.open("a", ContributorStream(), (*IDS, "3.1", "4.1"))
    assert not streams.returned
    assert deals.objection("a", IDS) == ""


def test_a_revoked_contributors_stream_ends_and_its_contribution_is_forgotten() -> None:
    streams, deals = made()
    stream = sent(streams, deals)
    deals.hand_in("a", IDS)
    assert streams.shut_out("a")
    assert stream.is_ended
    assert not streams.pending
    assert [group.group_id for group in deals.forget("a")] == [*IDS, "3.1", "4.1"]
    assert not streams.shut_out("a")
    assert not deals.known


@pytest.mark.parametrize(
    ("again", "reason"),
    [
        pytest.param(replace(FIRST, digest=bytes(16)), Reason.MALFORMED, id="another of its number"),
        pytest.param(replace(FIRST, number=2), Reason.BUSY, id="the next, before it is answered"),
    ],
)
def test_a_contribution_beside_one_that_waits_ends_the_stream(again: Contribution, reason: Reason) -> None:
    streams, deals = made()
    sent(streams, deals)
    assert not streams.is_new("a", FIRST, payload_bytes=0), "the same again"
    with refused(reason):
        streams.is_new("a", again, payload_bytes=0)


@pytest.mark.parametrize("payload_bytes", [-1, LIMIT + 1])
def test_a_payload_beyond_the_limit_is_not_read(payload_bytes: int) -> None:
    streams, _ = made()
    assert streams.is_new("a", FIRST, payload_bytes=LIMIT)
    with refused(Reason.OVER_LIMIT, str(LIMIT)):
        streams.is_new("a", FIRST, payload_bytes=payload_bytes)


async def test_a_contribution_that_comes_again_is_answered_as_it_was_and_its_groups_are_no_longer_held() -> (
    None
):
    streams, deals = made()
    stream = sent(streams, deals)
    streams.answer("a", Contributed("a", 1, FIRST.digest.hex(), version=7))
    assert not streams.is_new("a", FIRST, payload_bytes=0)
    told = stream.all_told()
    assert [await anext(told) for _ in range(3)] == [
        TERMS,
        ContributionAnswer(1, 7),
        ContributionAnswer(1, 7),
    ]
    assert [group.group_id for group in streams.returned] == IDS
    assert streams.is_new("a", replace(FIRST, number=2), payload_bytes=0)
