"""One pasted line makes a sampler of a machine that has only the package."""

import asyncio
import os
import shutil
import signal
import time
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from heterorl.v1 import common_pb2
from node.commands.cli import main
from node.commands.joining.systemd_unit import GPU_CONF, UNIT, unit_files
from node.enrolment.tokens import issue_token
from node.errors import Reason
from node.identity.identity_store import load_identity
from node.rpc.hub import Hub
from node.values.roles import Role
from node.weights.format import model_listing
from node.weights.format.model_listing import ModelFile, check_listing, listing_of
from node.weights.transfer.model_download import download_model
from sampler.engines.torch.torch_engine import TorchEngine
from support.hub import RunningHub, joined, running_hub
from support.identity import MadeRun
from support.refusals import cannot_start, refused
from support.sampler import learning
from support.warm_processes import AsyncProcess, start_warm


def token_of(hub: RunningHub, made: MadeRun, *, role: Role = Role.SAMPLER, uses: int = 1) -> str:
    assert hub.hub.enrolment_address is not None
    return issue_token(
        made.authority,
        role=role,
        node_id=None,
        address=hub.hub.enrolment_address,
        now=time.time(),
        uses=uses,
        coordinator=hub.address,
        run=made.run,
    )


JOIN = """
import os, sys
from node.commands.cli import main

def becomes(path, command):
    assert [path, *command[:3]] == [sys.executable, sys.executable, "-m", "node"]
    sys.exit(main(command[3:]))

os.execv = becomes
sys.exit(main(["join", *sys.argv[1:]]))
"""
"""``heterorl-node join``; it becomes the daemon without exec, after which torch would be imported again."""


@asynccontextmanager
async def join_process(*argv: object) -> AsyncIterator[AsyncProcess]:
    streams = asyncio.subprocess.PIPE, asyncio.subprocess.STDOUT
    process = await start_warm(["-c", JOIN, *map(str, argv)], *streams, env=os.environ)
    try:
        yield process
    finally:
        process.kill()
        await process.wait()
        assert process.stdout is not None
        await process.stdout.read()  # to its end, which closes it


async def says(process: AsyncProcess, text: str) -> None:
    """Wait until a line has this text; fail with all lines since the last time if the process ends before."""
    lines: list[str] = []
    assert process.stdout is not None
    async for line in process.stdout:
        lines.append(line.decode())
        if text in lines[-1]:
            return
    raise AssertionError(lines)


async def join(*argv: object) -> int:
    """Run the command in this process."""
    return await asyncio.to_thread(main, ["join", *map(str, argv)])


async def test_one_line_contributes_and_the_same_line_goes_on_after_a_kill(
    made: MadeRun, base: TorchEngine, model_dir: Path, tmp_path: Path
) -> None:
    here = tmp_path / "machine"
    model = here / "sampler" / "model"
    async with (
        running_hub(made, model_dir=model_dir) as hub,
        learning(hub, base, model_dir) as learner,
    ):
        line = (token_of(hub, made), "--state-dir", here, "--set", "sampler.concurrency_groups=2")
        async with asyncio.timeout(600), join_process(*line) as joining:
            await says(joining, '"event": "ready"')
            drain = await learner.drain(credits=1)
            group_id = await drain.group()
            await drain.judge(group_id, common_pb2.VERDICT_ACCEPTED)
            await drain.step(1, group_id)
            await says(joining, '"event": "first group trained"')
        identity = load_identity(here / "sampler" / "identity")
        assert identity is not None
        assert not (here / "sampler" / "token").exists()
        settings = tomllib.loads((here / "sampler.toml").read_text())
        assert settings["node"]["coordinator"] == hub.address
        assert settings["sampler"] == {
            "model_dir": str(model),
            "device": "auto",
            "engine": "auto",
            "concurrency_groups": 2,
        }
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            assert (model / name).read_bytes() == (model_dir / name).read_bytes()
        fetched_at = model.stat().st_mtime_ns
        async with asyncio.timeout(600), join_process(*line) as joining:
            await says(joining, f"known in run {made.run_id} as sampler {identity.node_id}")
            await says(joining, '"event": "ready"')
            joining.send_signal(signal.SIGTERM)
            assert await joining.wait() == 0
        assert model.stat().st_mtime_ns == fetched_at


async def test_a_token_with_a_count_makes_several_samplers_each_with_a_name_of_its_own(
    made: MadeRun, model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running_hub(made, model_dir=model_dir) as hub:
        token = tmp_path / "sampler.token"
        token.write_text(token_of(hub, made, uses=2))
        for number in (1, 2):
            directory = tmp_path / str(number)
            assert await join(token, "--state-dir", directory, "--model-dir", model_dir, "--no-start") == 0
        assert await join(token, "--state-dir", tmp_path / "3", "--no-start") == 3
    said = capsys.readouterr().err
    assert "used before, by 2 peers" in said
    assert f"start it with: heterorl-node --role sampler --config {tmp_path / '1' / 'sampler.toml'}" in said
    identities = [load_identity(tmp_path / str(number) / "sampler" / "identity") for number in (1, 2)]
    assert len({one.node_id for one in identities if one}) == 2


async def test_a_relay_joins_without_a_model(made: MadeRun, tmp_path: Path) -> None:
    async with running_hub(made) as hub:
        token = token_of(hub, made, role=Role.RELAY)
        assert await join(token, "--role", "sampler", "--state-dir", tmp_path / "a", "--no-start") == 2
        assert await join(token, "--role", "relay", "--state-dir", tmp_path / "a", "--no-start") == 0
    assert (tmp_path / "a" / "relay").stat().st_mode & 0o777 == 0o700
    settings = tomllib.loads((tmp_path / "a" / "relay.toml").read_text())
    assert settings["relay"] == {"listen": "0.0.0.0:7710"}


async def test_without_a_model_anywhere_the_command_says_how_to_give_it_one(
    made: MadeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running_hub(made) as hub:
        assert await join(token_of(hub, made), "--state-dir", tmp_path / "a", "--no-start") == 3
    assert "Set coordinator.model_dir there" in capsys.readouterr().err


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_listing, "BLOCK_BYTES", 10_000)


@pytest.mark.usefixtures("small_blocks")
async def test_a_model_that_is_there_in_part_is_completed_and_its_damaged_blocks_are_fetched_again(
    made: MadeRun, model_dir: Path, tmp_path: Path
) -> None:
    weights = (model_dir / "model.safetensors").read_bytes()
    part = tmp_path / ".model.part"
    part.mkdir()
    (part / "model.safetensors").write_bytes(b"damaged" + weights[7:45_000])
    (part / "config.json").write_bytes((model_dir / "config.json").read_bytes() + b"too long")
    shown: list[tuple[int, int]] = []
    async with joined(made, model_dir=model_dir) as (hub, _, sampler):
        target, now = tmp_path / "model", time.time()
        await download_model(
            Hub(hub.address),
            sampler.identity,
            target,
            now=now,
            progress=lambda *counted: shown.append(counted),
        )
    assert not part.exists()
    listed = listing_of(model_dir)
    assert listing_of(target) == listed
    assert shown[-1][0] == shown[-1][1] == sum(file.size_bytes for file in listed)


@pytest.mark.usefixtures("small_blocks")
async def test_a_model_that_changed_under_the_coordinator_is_refused(
    made: MadeRun, model_dir: Path, tmp_path: Path
) -> None:
    handed_out = tmp_path / "handed out"
    shutil.copytree(model_dir, handed_out)
    target, now = tmp_path / "model", time.time()
    async with joined(made, model_dir=handed_out) as (hub, _, sampler):
        ask = partial(download_model, Hub(hub.address), sampler.identity, now=now, progress=lambda *_: None)
        await ask(tmp_path / "first")
        with (handed_out / "model.safetensors").open("r+b") as file:
            file.write(b"changed")
        with cannot_start("model.safetensors"):
            await ask(target)
    assert not target.exists()


@pytest.mark.parametrize(
    ("changes", "reason", "named"),
    [
        ({"name": "../run.json"}, Reason.MALFORMED, "../run.json"),
        ({"name": "modeling.py"}, Reason.MALFORMED, "modeling.py"),
        ({"name": ".bashrc.json"}, Reason.MALFORMED, ".bashrc.json"),
        ({"digests": b""}, Reason.MALFORMED, "1 blocks"),
        ({"size_bytes": 1 << 62}, Reason.OVER_LIMIT, str(1 << 62)),
    ],
)
def test_a_list_that_would_leave_the_directory_or_fill_the_disk_is_refused(
    changes: dict[str, Any], reason: Reason, named: str
) -> None:
    good = ModelFile("config.json", 2, bytes(16))
    check_listing((good,))
    with refused(reason, named):
        check_listing((replace(good, **changes),))
    with refused(Reason.MALFORMED):
        check_listing((good, good))


def test_the_service_runs_this_installation_and_reaches_a_gpu_where_there_is_one() -> None:
    program = Path("/srv/rl/bin/heterorl-node")
    units = unit_files(Role.SAMPLER, program=program, device="cuda")
    assert set(units) == {UNIT, GPU_CONF}
    assert f"ExecStart={program} --role %i --config /etc/heterorl-node/%i.toml" in units[UNIT]
    assert set(unit_files(Role.RELAY, program=program, device="cuda")) == {UNIT}
    assert set(unit_files(Role.SAMPLER, program=program, device="cpu")) == {UNIT}
    with cannot_start("/home/me/.venv/bin/heterorl-node"):
        unit_files(Role.SAMPLER, program=Path("/home/me/.venv/bin/heterorl-node"), device="cpu")
