"""The socket on which a coordinator takes orders: who may call, where it is, what commands do without it."""

import asyncio
import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from node.commands.cli import main
from node.coordinator.operators.order_desk import SOCKET_NAME
from node.errors import Reason
from node.values.operator_order import PAUSE, REVOKE, Order
from support.by_rpc import say
from support.enrolled import let_in
from support.hub import joined, running_hub
from support.identity import MadeRun
from support.orders import give
from support.refusals import refused


async def test_the_socket_is_its_owners_alone_and_gone_once_the_coordinator_has_stopped(
    made: MadeRun,
) -> None:
    state = made.directory / "coordinator"
    async with running_hub(made):
        mode = (state / SOCKET_NAME).stat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600
        assert not list(state.glob(".orders*"))
    assert not (state / SOCKET_NAME).exists()


async def test_a_state_directory_with_a_long_path_has_one_too(made: MadeRun, tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 100) / ("e" * 100)
    directory.parent.mkdir()
    made.directory.rename(directory)
    async with joined(replace(made, directory=directory)) as (_, _, sampler):
        await say(replace(made, directory=directory), "pause")
        assert (await sampler.lease()).waits_for == "paused"


async def test_a_socket_that_a_killed_coordinator_left_is_passed_over_and_then_replaced(
    made: MadeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    path = made.directory / "coordinator" / SOCKET_NAME
    bind = f"import socket, os; s = socket.socket(socket.AF_UNIX); s.bind({str(path.name)!r})"
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", bind], cwd=path.parent, check=True)
    await say(made, "pause")
    assert "no coordinator runs here" in capsys.readouterr().err
    async with joined(made) as (_, _, sampler):
        assert (await sampler.lease()).waits_for == "paused"
        await say(made, "resume")
        assert len((await sampler.lease()).leases) == 1


async def test_orders_are_given_and_listed_with_who_when_and_why_as_before_a_restart(
    made: MadeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    let_in(made.directory, "sampler-1")

    async def listed() -> Any:
        await say(made, "revoke", "--list", "--json")
        return json.loads(capsys.readouterr().out)

    async with running_hub(made):
        await say(made, "revoke", "sampler-1", "--because", "its disk was sold")
        capsys.readouterr()
        while_it_runs = await listed()
    assert await listed() == while_it_runs
    async with running_hub(made):
        assert await listed() == while_it_runs
    (told,) = while_it_runs
    assert (told["about"], told["because"]) == ("sampler-1", "its disk was sold")
    assert told["by"]
    assert told["at_s"] > 0


async def test_what_is_no_order_is_refused_by_name_and_counts_for_nothing(made: MadeRun) -> None:
    state = made.directory / "coordinator"
    async with running_hub(made) as hub:
        for orders, names in (
            ((), ()),
            ((Order("frob", order_id="1"),), ("frob",)),
            ((Order(PAUSE, order_id="1"), Order(REVOKE, "s1", order_id="1")), ()),
            ((Order(REVOKE, "s9", order_id="1", is_undone=True),), ("s9",)),
        ):
            with refused(Reason.MALFORMED, *names):
                await give(state, *orders)
        assert len(hub.hub.accounts.orders) == 0
        (stands,) = await give(state, Order(PAUSE, order_id="1", answer="yes", is_refused=True, at_s=5.0))
        assert (stands.answer, stands.is_refused, stands.at_s > 5.0) == ("", False, True)


async def test_two_commands_at_once_are_both_taken(made: MadeRun) -> None:
    names = [f"s-{number}" for number in range(8)]
    for name in names:
        let_in(made.directory, name)
    async with running_hub(made) as hub:
        await asyncio.gather(*(say(made, "drain", name) for name in names))
        assert set(hub.hub.accounts.orders.of("drain")) == set(names)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
async def test_another_user_may_not_call(made: MadeRun) -> None:
    async with running_hub(made):
        path = made.directory / "coordinator" / SOCKET_NAME
        code = (
            "import os; from pathlib import Path; from node.rpc.local_socket import local_channel\n"
            "os.setgid(65534); os.setuid(65534)\n"
            f"with local_channel(Path({str(path)!r})): pass"
        )
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
        )
    assert "StartupError" in done.stderr
    assert f"{path.parent}" in done.stderr


async def test_a_ledger_that_somebody_holds_is_not_written_beside_them(
    made: MadeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running_hub(made):
        (made.directory / "coordinator" / SOCKET_NAME).unlink()
        assert await asyncio.to_thread(main, ["pause", "--state-dir", str(made.directory)]) == 3
    assert "ledger.sqlite" in capsys.readouterr().err
