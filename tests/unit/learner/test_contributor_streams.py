"""Contributors' streams: what a hello may change while a contribution of the process before it is unread."""

from prometheus_client import CollectorRegistry

from learner.merging.contributor_streams import ContributorStreams
from learner.merging.deals import DealRules, Deals
from learner.merging.merge_metrics import MergeMetrics
from node.errors import Reason
from node.serving.merge_servicer import ContributorStream
from node.telemetry.metric_factory import MetricFactory
from node.values.contribution import Contribution, MergeTerms
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


def made() -> tuple[ContributorStreams, Deals]:
    deals = Deals(RULES, now=0.0)
    streams = ContributorStreams(
        deals,
        MergeTerms(b"{}", b"{}", 2),
        was_trained=lambda _: False,
        merged=(),
        payload_limit=100,
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
    streams.hand_in("a", Contribution(1, 0, b"{}", b"", bytes(16)))
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
