"""A learner of several hosts: its Job, its headless Service and its configuration speak of the same ranks."""

import json
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.check import DEPLOY
from learner.config import LearnerConfig
from node.config.settings import load
from support import warm_python

RANKS = DEPLOY / "k8s/overlays/ranks"


@pytest.fixture
def documents() -> dict[str, dict[str, Any]]:
    return {one["kind"]: one for one in yaml.safe_load_all((RANKS / "learner.yaml").read_text())}


@pytest.fixture
def flags(documents: dict[str, dict[str, Any]]) -> dict[str, str]:
    [container] = documents["Job"]["spec"]["template"]["spec"]["containers"]
    program, *flags = container["command"]
    assert program == "torchrun"
    return dict(flag.removeprefix("--").split("=", 1) for flag in flags)


def settings() -> Any:
    return load(roles=["learner"], files=[RANKS / "config/learner.toml"], environ={}).config


def test_there_are_as_many_processes_as_the_mesh_has_ranks(
    documents: dict[str, dict[str, Any]], flags: dict[str, str]
) -> None:
    job = documents["Job"]["spec"]
    config = settings().section(LearnerConfig)
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"] == int(flags["nnodes"])
    ranks = config.pp * config.dp_replicate * config.dp_shard * config.tp
    assert ranks == int(flags["nnodes"]) * int(flags["nproc-per-node"])


def test_every_host_finds_the_first_one(documents: dict[str, dict[str, Any]], flags: dict[str, str]) -> None:
    service, job = documents["Service"], documents["Job"]
    pod = job["spec"]["template"]
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    assert flags["master-addr"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert flags["node-rank"] == "$(JOB_COMPLETION_INDEX)"


def test_ranks_reach_each_other_and_nobody_else_reaches_them(documents: dict[str, dict[str, Any]]) -> None:
    policy, labels = (
        documents["NetworkPolicy"]["spec"],
        documents["Job"]["spec"]["template"]["metadata"]["labels"],
    )
    assert policy["podSelector"]["matchLabels"] == labels
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": labels}}]}]


def test_a_rank_that_ended_starts_again_and_is_given_time_to_drain(
    documents: dict[str, dict[str, Any]],
) -> None:
    pod = documents["Job"]["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "OnFailure"
    assert documents["Job"]["spec"]["backoffLimit"] >= 1000
    assert pod["terminationGracePeriodSeconds"] > settings().node.drain_timeout_s


def test_state_is_shared_and_every_path_is_mounted(documents: dict[str, dict[str, Any]]) -> None:
    claim, pod = documents["PersistentVolumeClaim"], documents["Job"]["spec"]["template"]["spec"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["state"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    [container] = pod["containers"]
    mounted = {Path(one["mountPath"]) for one in container["volumeMounts"]}
    config = settings()
    assert {
        config.node.state_dir,
        config.section(LearnerConfig).model_dir.parent,
        Path("/dev/shm"),
    } <= mounted
    assert Path(container["args"][-1]).parent in mounted
    assert container["args"][:4] == ["-m", "learner.ranks", "--role", "learner"]


def test_probes_ask_the_first_rank_where_its_telemetry_listens(documents: dict[str, dict[str, Any]]) -> None:
    [container] = documents["Job"]["spec"]["template"]["spec"]["containers"]
    listens = settings().telemetry.http_listen
    for probe in (container["startupProbe"], container["livenessProbe"]):
        *_, command = probe["exec"]["command"]
        assert re.findall(r"http://(\S+)/healthz", command) == [listens]
        assert command.startswith('[ "$JOB_COMPLETION_INDEX" != 0 ] || exec python')


FAMILIES = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10, "AF_NETLINK": 16}
SOCKET_CALL = {"x86_64": 41, "aarch64": 198}
"""Number of socket(2)."""

MEETING = """
import ctypes, json, os, struct, sys
import torch.distributed as dist

libc, call = ctypes.CDLL(None), int(sys.argv[2])
for families in json.loads(sys.argv[1]):
    if os.fork():
        print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
        continue
    instructions = [(0x20, 0, 0, 0), (0x15, 0, len(families) + 2, call), (0x20, 0, 0, 16)]
    for place, family in enumerate(families):
        instructions.append((0x15, len(families) - place, 0, family))
    instructions += [(0x06, 0, 0, 0x00050000 | 97), (0x06, 0, 0, 0x7FFF0000)]
    code = b"".join(struct.pack("HBBI", *one) for one in instructions)
    content = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxQ", len(instructions), ctypes.addressof(content))
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, program) == 0
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    os._exit(0)
"""
"""Ranks in turn: each refuses all families but its own, as systemd does, and meets the others, of which
there are none."""


def exit_codes(*families: list[str]) -> list[int]:
    """Start a rank for each list of families; return how they ended."""
    numbers = json.dumps([[FAMILIES[family] for family in each] for each in families])
    warm = [sys.executable, warm_python.__file__]
    command = [*warm, "-c", MEETING, numbers, str(SOCKET_CALL[platform.machine()])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    return [int(line) for line in done.stdout.split()]


@pytest.mark.usefixtures("warm_server")
def test_ranks_meet_within_what_the_unit_lets_them() -> None:
    unit = (DEPLOY / "systemd/heterorl-node@.service").read_text()
    [families] = re.findall(r"^RestrictAddressFamilies=(.*)$", unit, re.MULTILINE)
    assert exit_codes(families.split(), ["AF_UNIX", "AF_INET", "AF_INET6"]) == [0, 1]
