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


@pytest.fixture(scope="module")
def ports() -> Ports:
    return Ports.free(DAEMONS, others=(LINK,))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def configs(directory: Path, ports: Ports) -> dict[str, NodeConfig]:
    """Return what each process reads."""
    plan = Plan(seed=3, versions=50, has_chaos=False)
    found = {}
    for name, document in configurations(plan, RunDirectory(directory / "demo-1"), ports).items():
        path = directory / f"{name}.toml"
        path.write_text(to_toml(document))
        assert tomllib.loads(path.read_text()) == document
        found[name] = load(roles=[name.partition("-")[0]], files=[path], environ={}).config
    return found


@pytest.mark.parametrize("name", DAEMONS)
def test_every_process_accepts_its_configuration(
    name: str, configs: dict[str, NodeConfig], directory: Path, ports: Ports
) -> None:
    config = configs[name]
    assert config.node.state_dir == directory / "demo-1" / "state" / name
    assert config.telemetry.http_listen == f"127.0.0.1:{ports.telemetry[name]}"
    assert config.node.tls


def test_only_the_far_sampler_goes_through_the_link(configs: dict[str, NodeConfig], ports: Ports) -> None:
    ways = {name: configs[name].node.coordinator for name in DAEMONS}
    direct, link = f"127.0.0.1:{ports.members}", f"127.0.0.1:{ports.others[LINK]}"
    assert ways == {COORDINATOR: None, LEARNER: direct, NEAR: direct, FAR: link}


def test_samplers_draw_from_different_seeds_and_fill_their_batches_within_the_bounds_of_the_hub(
    configs: dict[str, NodeConfig],
) -> None:
    hub = configs[COORDINATOR].section(CoordinatorConfig)
    samplers = [configs[name].section(SamplerConfig) for name in (NEAR, FAR)]
    assert samplers[0].seed != samplers[1].seed
    assert sum(sampler.concurrency_groups or 0 for sampler in samplers) <= hub.concurrency_groups


def test_ports_are_all_different(ports: Ports) -> None:
    every = (ports.members, ports.enrolment, *ports.others.values(), *ports.telemetry.values())
    assert len(set(every)) == len(every) == 3 + len(DAEMONS)
