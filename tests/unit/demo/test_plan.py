import tomllib
from pathlib import Path

import pytest

from deploy.demo.plan import (
    FAR,
    LINK,
    NEAR,
    Plan,
    configurations,
)
from deploy.runs.run_directory import COORDINATOR, LEARNER, Ports, RunDirectory, to_toml
from node.config.settings import NodeConfig, load
from node.coordinator.config import CoordinatorConfig
from sampler.config import SamplerConfig

DAEMONS = (COORDINATOR, LEARNER, NEAR, FAR)


def _config(name: str, tmp_path: Path, ports: Ports) -> NodeConfig:
    plan = Plan(seed=3, versions=50, has_chaos=False)
    document = configurations(plan, RunDirectory(tmp_path / "demo-1"), ports)[name]
    path = tmp_path / f"{name}.toml"
    path.write_text(to_toml(document))
    assert tomllib.loads(path.read_text()) == document
    role = name.partition("-")[0]
    return load(roles=[role], files=[path], environ={}).config


@pytest.mark.parametrize("name", DAEMONS)
def test_every_process_accepts_its_configuration(name: str, tmp_path: Path) -> None:
    ports = Ports.free(DAEMONS, others=(LINK,))
    config = _config(name, tmp_path, ports)
    assert config.node.state_dir == tmp_path / "demo-1" / "state" / name
    assert config.telemetry.http_listen == f"127.0.0.1:{ports.telemetry[name]}"
    assert config.node.tls


def test_only_the_far_sampler_goes_through_the_link(tmp_path: Path) -> None:
    ports = Ports.free(DAEMONS, others=(LINK,))
    ways = {name: _config(name, tmp_path, ports).node.coordinator for name in DAEMONS}
    direct, link = f"127.0.0.1:{ports.members}", f"127.0.0.1:{ports.others[LINK]}"
    assert ways == {COORDINATOR: None, LEARNER: direct, NEAR: direct, FAR: link}


def test_the_samplers_draw_from_different_seeds(tmp_path: Path) -> None:
    ports = Ports.free(DAEMONS, others=(LINK,))
    seeds = {_config(name, tmp_path, ports).section(SamplerConfig).seed for name in (NEAR, FAR)}
    assert len(seeds) == 2


def test_every_sampler_fills_its_batch_within_the_bounds_of_the_hub(tmp_path: Path) -> None:
    ports = Ports.free(DAEMONS, others=(LINK,))
    hub = _config(COORDINATOR, tmp_path, ports).section(CoordinatorConfig)
    samplers = [_config(name, tmp_path, ports).section(SamplerConfig) for name in (NEAR, FAR)]
    assert sum(sampler.concurrency_groups or 0 for sampler in samplers) <= hub.concurrency_groups


def test_ports_are_all_different() -> None:
    ports = Ports.free(DAEMONS, others=(LINK,))
    every = (ports.members, ports.enrolment, *ports.others.values(), *ports.telemetry.values())
    assert len(set(every)) == len(every) == 3 + len(DAEMONS)
