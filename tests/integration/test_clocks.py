"""A clock is wrong somewhere: nobody ends for it, and everyone says whose it is. Real hubs, real TLS.

TLS takes the machine's time, so a hub an hour behind is a certificate that begins an hour ahead.
"""

import argparse
import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from node.clients.membership.heartbeats import Notices, PeerReports
from node.clients.membership.join_call import Member
from node.clients.membership.membership_client import MembershipClient, Uplink
from node.commands.status import status_command
from node.enrolment.authority import LEAF_LIFETIME_S
from node.enrolment.init_run import issue_identity
from node.errors import Reason
from node.exit_code import ExitCode
from node.identity.identity_store import Identity, save_identity
from node.identity.peer import Peer
from node.rpc.channel import Purpose, dial
from node.system.backoff import Backoff
from node.system.clock import Clock, SystemClock, moment
from node.telemetry.metrics import NodeMetrics
from node.values.roles import Role
from node.weights.transfer.sources import watch_versions
from support.clock import ManualClock
from support.hub import LAYOUT, TOKENIZER, running_hub
from support.identity import MadeRun
from support.refusals import refused
from support.rpc import every_service, recheck_often, serving
from support.waiting import until

DAY_S = 86400.0


def joins(caplog: pytest.LogCaptureFixture) -> int:
    return max((vars(r)["joins"] for r in caplog.records if r.getMessage() == "joined"), default=0)


def disagreements(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """Return what was waited for and what was said of it, each time."""
    found = [vars(r) for r in caplog.records if r.getMessage() == "clocks disagree"]
    return [(fields["waits_for"], fields["detail"]) for fields in found]


def losses(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what was said of each connection to the coordinator that was lost."""
    said = "connection to the coordinator lost"
    return [vars(r)["detail"] for r in caplog.records if r.getMessage() == said]


@dataclass(slots=True)
class Client:
    """A peer's membership, and what it waits for."""

    metrics: NodeMetrics
    running: "asyncio.Task[None]"
    stopping: asyncio.Event


@asynccontextmanager
async def membership(identity: Identity, address: str, clock: Clock) -> AsyncIterator[Client]:
    """Run a peer's membership; its TLS takes the machine's time, everything else ``clock``."""
    metrics = NodeMetrics(CollectorRegistry(), roles=["sampler"], clock=clock)
    stopping = asyncio.Event()
    async with dial(address, identity, purpose=Purpose.CONTROL, now=clock.now()) as channel:
        client = MembershipClient(
            channel,
            Member(identity.run_id, identity.role, LAYOUT, TOKENIZER),
            Uplink(clock, Backoff(lambda: 0.5, cap_s=0.5), metrics.waiting, identity),
            reports=PeerReports(held=lambda: None, waits_for=lambda: ""),
            notices=Notices(),
        )
        running = asyncio.create_task(client.run(ready=lambda: None, stopping=stopping))
        try:
            yield Client(metrics, running, stopping)
        finally:
            stopping.set()
            await asyncio.gather(running, return_exceptions=True)


async def test_a_peer_waits_for_a_coordinator_whose_clock_is_ahead_and_joins_again_when_it_is_right(
    made: MadeRun, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    recheck_often(monkeypatch)
    async with running_hub(made) as hub, membership(made.sampler, hub.address, SystemClock()) as client:
        await until(lambda: joins(caplog) == 1)
        hub.clock.advance(400 * DAY_S)
        await until(lambda: client.metrics.waits_for == "coordinator's clock")
        waits_for, detail = disagreements(caplog)[0]
        assert waits_for == "coordinator's clock"
        assert "the certificate of sampler-1 is valid from " in detail
        assert hub.metric("heterorl_node_refusals_total", service="MembershipService", reason="expired") > 0
        hub.clock.advance(-400 * DAY_S)
        await until(lambda: joins(caplog) == 2)


async def test_announcements_are_waited_for_while_the_coordinators_clock_is_ahead(made: MadeRun) -> None:
    async with running_hub(made) as hub:
        hub.clock.advance(400 * DAY_S)
        async with dial(hub.address, made.sampler, purpose=Purpose.CONTROL, now=time.time()) as channel:
            announcements = watch_versions(channel, random=lambda: 0.0)
            watching = asyncio.ensure_future(anext(announcements))
            refused = {"service": "PolicyService", "reason": "expired"}
            await until(lambda: hub.metric("heterorl_node_refusals_total", **refused) > 3)
            assert not watching.done()
            watching.cancel()


async def test_a_certificate_that_has_expired_by_both_clocks_ends_the_peer_and_says_how_to_enrol_again(
    made: MadeRun,
) -> None:
    clock = ManualClock(time.time())
    async with running_hub(made) as hub, membership(made.sampler, hub.address, clock) as client:
        clock.advance(2 * LEAF_LIFETIME_S)
        hub.clock.advance(2 * LEAF_LIFETIME_S)
        with refused(Reason.EXPIRED, "heterorl-node token DIR --role"):
            await asyncio.wait_for(client.running, 20)


async def test_a_hub_that_closes_the_handshake_on_a_good_certificate_is_waited_for_with_both_dates_said(
    made: MadeRun, caplog: pytest.LogCaptureFixture
) -> None:
    # Its certificate begins in a day by the machine's clock: the hub is that far behind.
    identity, clock = made.not_yet_valid, ManualClock(time.time() + 2 * DAY_S)
    async with (
        serving(made, every_service) as hub,
        membership(identity, hub.address, clock) as client,
    ):
        await until(lambda: bool(losses(caplog)))
        assert "If this stays so, the coordinator's clock is outside these dates" in losses(caplog)[0]
        assert (
            f"valid from {moment(identity.not_before_s)} to {moment(identity.not_after_s)}"
            in losses(caplog)[0]
        )
        assert not client.running.done()


async def test_a_hub_whose_certificate_is_not_valid_here_is_named_and_waited_for(
    made: MadeRun, caplog: pytest.LogCaptureFixture
) -> None:
    hub_identity = issue_identity(
        made.authority,
        Peer(made.run_id, Role.COORDINATOR, "coordinator"),
        now=time.time() + 2 * DAY_S,
        lifetime_s=LEAF_LIFETIME_S,
    )
    async with (
        serving(made, every_service, identity=hub_identity) as hub,
        membership(made.sampler, hub.address, SystemClock()) as client,
    ):
        await until(lambda: client.metrics.waits_for == "this machine's clock")
        assert "the coordinator's certificate is not valid by it" in disagreements(caplog)[0][1]


async def test_status_names_both_clocks_when_the_coordinators_is_ahead(
    made: MadeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state_dir = tmp_path / "elsewhere"
    save_identity(made.operator, state_dir / "operator" / "identity")
    made.run.save(state_dir / "run.json")
    parser = argparse.ArgumentParser()
    status_command.add_arguments(parser)
    async with running_hub(made) as hub:
        hub.clock.advance(20 * 365 * DAY_S)
        arguments = parser.parse_args(["--state-dir", str(state_dir), "--coordinator", hub.address])
        ending = await asyncio.to_thread(status_command.run, arguments, clock=SystemClock())
    assert ending == ExitCode.FAILED
    said = capsys.readouterr().err
    assert re.search(r"the coordinator's clock says 204\d-.* UTC, this machine's clock says 20[23]\d-", said)
    assert "the certificate of operator is valid from " in said
