"""A peer's identity is on its disk, or it gets one with a token, or it is told what to do."""

import time
from pathlib import Path

import pytest

from node.enrolment.authority import Authority
from node.enrolment.enrolment_client import kept_name, obtain_identity
from node.enrolment.init_run import init_run
from node.enrolment.tokens import issue_token, write_token_file
from node.identity.identity_store import Identity
from node.identity.run_description import RunDescription
from node.values.roles import Role
from support.refusals import cannot_start, misconfigured

NOW = time.time()


@pytest.fixture
def run(tmp_path: Path) -> RunDescription:
    return init_run(tmp_path, run_id="r", hosts=["localhost"], now=NOW)


async def obtained(
    run: RunDescription,
    directory: Path,
    role: Role,
    *,
    node_id: str | None = None,
    token_file: Path | None = None,
    now: float = NOW,
) -> Identity:
    return await obtain_identity(
        directory / role / "identity",
        run=run,
        role=role,
        node_id=node_id,
        token_file=token_file,
        now=now,
        warn=pytest.fail,
    )


async def test_a_peer_with_a_certificate_needs_no_token(run: RunDescription, tmp_path: Path) -> None:
    identity = await obtained(run, tmp_path, Role.LEARNER)
    assert (identity.node_id, identity.role, identity.run_id) == ("learner", Role.LEARNER, "r")


@pytest.mark.parametrize(
    ("role", "names"),
    [
        (Role.SAMPLER, ("heterorl-node token DIR --role sampler", "node.token_file")),
        (Role.COORDINATOR, ("heterorl-node init",)),
    ],
)
async def test_a_peer_with_neither_is_told_how_to_get_one(
    run: RunDescription, tmp_path: Path, role: Role, names: tuple[str, ...]
) -> None:
    with cannot_start(*names):
        await obtained(run, tmp_path / "x", role)


async def test_a_certificate_that_will_not_be_let_in_is_found_before_the_hub_is_asked(
    run: RunDescription, tmp_path: Path
) -> None:
    with cannot_start("expired", "learner"):
        await obtained(run, tmp_path, Role.LEARNER, now=NOW + 1e9)


async def test_a_configured_name_must_be_the_certificates(run: RunDescription, tmp_path: Path) -> None:
    with misconfigured("learner", key="node.node_id"):
        await obtained(run, tmp_path, Role.LEARNER, node_id="other")
    coordinator = await obtained(run, tmp_path, Role.COORDINATOR, node_id="other")
    assert coordinator.node_id == "coordinator"


@pytest.mark.parametrize("content", [None, b"", b"not a token", b"\xff"])
async def test_a_token_that_is_none_is_refused_with_the_file_named(
    run: RunDescription, tmp_path: Path, content: bytes | None
) -> None:
    token_file = tmp_path / "sampler.token"
    if content is not None:
        token_file.write_bytes(content)
    with cannot_start("sampler.token"):
        await obtained(run, tmp_path, Role.SAMPLER, token_file=token_file)


def test_a_random_name_is_kept_over_restarts(tmp_path: Path) -> None:
    first = kept_name(tmp_path / "a", role=Role.SAMPLER)
    assert first.startswith("sampler-")
    assert kept_name(tmp_path / "a", role=Role.SAMPLER) == first
    assert kept_name(tmp_path / "b", role=Role.SAMPLER) != first


@pytest.mark.parametrize("content", ["Not A Name", "näme"])
def test_a_name_file_that_holds_no_name_is_a_startup_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "node_id").write_text(content)
    with cannot_start("node_id"):
        kept_name(tmp_path, role=Role.SAMPLER)


@pytest.mark.parametrize(
    ("role", "address", "is_twin", "names"),
    [
        (Role.RELAY, "hub:1", False, ("relay", "sampler")),
        (Role.SAMPLER, "hub", False, ("'hub'", "host:port")),
        (Role.SAMPLER, "hub:1", True, ("run r", "authority")),
    ],
)
async def test_a_token_for_another_role_or_run_is_not_shown_to_anyone(
    run: RunDescription, tmp_path: Path, role: Role, address: str, is_twin: bool, names: tuple[str, ...]
) -> None:
    if is_twin:
        init_run(tmp_path / "twin", run_id="r", hosts=[], now=NOW)
    authority = Authority.load(tmp_path / ("twin" if is_twin else ".") / "coordinator" / "authority")
    text = issue_token(authority, role=role, node_id=None, address=address, now=NOW)
    write_token_file(tmp_path / "token", text)
    with cannot_start(*names):
        await obtained(run, tmp_path, Role.SAMPLER, token_file=tmp_path / "token")
