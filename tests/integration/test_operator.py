"""An operator enrols, looks and revokes: the real commands against a real coordinator."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from node.commands.cli import main
from node.errors import Reason
from node.identity.files import make_private_directory
from node.identity.identity_store import load_identity
from node.rpc.channel import Purpose, dial
from node.values.roles import Role
from support.hub import RunningHub, running_hub
from support.identity import MadeRun
from support.rpc import invoke, refusal_of

GET_STATUS = "/heterorl.v1.MembershipService/GetStatus"
JOIN = "/heterorl.v1.MembershipService/Join"


@dataclass(frozen=True, slots=True)
class Said:
    code: int
    out: str
    err: str


Command = Callable[..., Awaitable[Said]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run ``heterorl-node`` as an operator would."""

    async def run(*argv: object) -> Said:
        code = await asyncio.to_thread(main, [str(word) for word in argv])
        return Said(code, *capsys.readouterr())

    return run


def enrolment_of(hub: RunningHub) -> str:
    address = hub.hub.enrolment_address
    assert address is not None
    return address


@asynccontextmanager
async def elsewhere(
    made: MadeRun, directory: Path, command: Command
) -> AsyncIterator[tuple[RunningHub, tuple[object, ...]]]:
    """Run a hub beside an operator's own machine with run.json and a token; yield its status command."""
    make_private_directory(directory)
    made.run.save(directory / "run.json")
    token = directory / "operator.token"
    async with running_hub(made) as hub:
        where = ("--address", enrolment_of(hub), "--out", token)
        said = await command("token", made.directory, "--role", "operator", *where)
        assert (said.code, said.out) == (0, "")
        yield hub, ("status", "--state-dir", directory, "--coordinator", hub.address)


async def test_an_operator_enrols_from_any_machine_with_a_token_once_and_may_only_ask_for_the_status(
    made: MadeRun, tmp_path: Path, command: Command
) -> None:
    async with elsewhere(made, tmp_path / "laptop", command) as (hub, status):
        said = await command(*status)
        assert said.code == 3
        assert "heterorl-node token DIR --role operator --address HOST:PORT --out FILE" in said.err
        said = await command(*status, "--token-file", tmp_path / "laptop" / "operator.token")
        assert said.code == 0, said.err
        assert "enrolled as operator-" in said.err
        assert "run       example" in said.out
        (tmp_path / "laptop" / "operator.token").unlink()
        said = await command(*status, "--json")
        assert (said.code, said.err) == (0, "")
        assert json.loads(said.out)["run_id"] == "example"
        operator = load_identity(tmp_path / "laptop" / "operator" / "identity")
        assert operator is not None
        assert operator.role is Role.OPERATOR
        async with dial(hub.address, operator, purpose=Purpose.CONTROL, now=time.time()) as channel:
            assert await invoke(channel, GET_STATUS)
            assert (await refusal_of(channel, JOIN)).reason is Reason.WRONG_ROLE


async def test_status_on_the_enrolment_port_says_which_port_is_which(made: MadeRun, command: Command) -> None:
    async with running_hub(made) as hub:
        said = await command("status", "--state-dir", made.directory, "--coordinator", enrolment_of(hub))
    assert said.code == 1
    assert "this is the enrolment port of run example" in said.err
    assert "the coordinator's members port (coordinator.listen, 7700 by default)" in said.err
    assert "one version everywhere" not in said.err


async def test_what_status_writes_into_a_pipe_is_never_cut(made: MadeRun, command: Command) -> None:
    name = "sampler-in-a-data-centre-far-away-with-a-name-of-sixty-letters"
    waits_for = "a policy version that a relay behind a very long and narrow line has not passed on yet"
    async with running_hub(made) as hub, hub.peer(made.issue(Role.SAMPLER, name)) as peer:
        await peer.join()
        await peer.heartbeat(waits_for=waits_for)
        said = await command("status", "--state-dir", made.directory, "--coordinator", hub.address)
    (row,) = [line for line in said.out.splitlines() if line.startswith("sampler-in")]
    assert name in row
    assert waits_for in row
