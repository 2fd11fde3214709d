import time
from pathlib import Path

import pytest

from node.config.settings import NodeSection
from node.enrolment.enrolment_client import kept_name
from node.enrolment.init_run import init_run
from node.errors import ConfigError, StartupError
from node.identity.run_description import RunDescription
from node.process.bootstrap import obtain_identity
from node.run import Role

NOW = time.time()


@pytest.fixture
def run(tmp_path: Path) -> RunDescription:
    return init_run(tmp_path, run_id="r", hosts=["localhost"], now=NOW)


async def test_a_peer_with_a_certificate_needs_no_token(run: RunDescription, tmp_path: Path) -> None:
    identity = await obtain_identity(NodeSection(state_dir=tmp_path), role=Role.LEARNER, run=run, now=NOW)
    assert (identity.node_id, identity.role, identity.run_id) == ("learner", Role.LEARNER, "r")


async def test_a_peer_with_neither_is_told_how_to_get_a_token(run: RunDescription, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="no token") as caught:
        await obtain_identity(NodeSection(state_dir=tmp_path), role=Role.SAMPLER, run=run, now=NOW)
    assert "heterorl-node token DIR --role sampler" in caught.value.fix
    assert "node.token_file" in caught.value.fix


async def test_a_coordinator_without_its_certificate_is_told_to_use_the_directory_of_init(
    run: RunDescription, tmp_path: Path
) -> None:
    with pytest.raises(StartupError) as caught:
        await obtain_identity(NodeSection(state_dir=tmp_path / "x"), role=Role.COORDINATOR, run=run, now=NOW)
    assert "heterorl-node init" in caught.value.fix


async def test_a_certificate_that_will_not_be_let_in_is_found_before_the_hub_is_asked(
    run: RunDescription, tmp_path: Path
) -> None:
    with pytest.raises(StartupError, match="expired"):
        await obtain_identity(NodeSection(state_dir=tmp_path), role=Role.LEARNER, run=run, now=NOW + 1e9)


async def test_a_configured_name_must_be_the_certificates(run: RunDescription, tmp_path: Path) -> None:
    node = NodeSection(state_dir=tmp_path, node_id="other")
    with pytest.raises(ConfigError, match="names learner"):
        await obtain_identity(node, role=Role.LEARNER, run=run, now=NOW)
    coordinator = await obtain_identity(node, role=Role.COORDINATOR, run=run, now=NOW)
    assert coordinator.node_id == "coordinator"


@pytest.mark.parametrize("content", [None, b"", b"not a token", b"\xff"])
async def test_a_token_that_is_none_is_refused_with_the_file_named(
    run: RunDescription, tmp_path: Path, content: bytes | None
) -> None:
    token_file = tmp_path / "sampler.token"
    if content is not None:
        token_file.write_bytes(content)
    node = NodeSection(state_dir=tmp_path, token_file=token_file)
    with pytest.raises(StartupError, match=r"sampler\.token"):
        await obtain_identity(node, role=Role.SAMPLER, run=run, now=NOW)


def test_a_random_name_is_kept_over_restarts(tmp_path: Path) -> None:
    first = kept_name(tmp_path / "a", role=Role.SAMPLER)
    assert first.startswith("sampler-")
    assert kept_name(tmp_path / "a", role=Role.SAMPLER) == first
    assert kept_name(tmp_path / "b", role=Role.SAMPLER) != first


@pytest.mark.parametrize("content", ["Not A Name", "näme"])
def test_a_name_file_that_holds_no_name_is_a_startup_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "node_id").write_text(content)
    with pytest.raises(StartupError, match="not a valid node id"):
        kept_name(tmp_path, role=Role.SAMPLER)
