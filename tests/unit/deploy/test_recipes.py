"""Every recipe loads as the configuration of its role, with nothing left out and no key unknown."""

from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet

from deploy.check import DEPLOY
from deploy.real.real_plan import TASK_FILES
from learner.config import LearnerConfig
from learner.contributor.config import ContributorConfig
from node.config.settings import NodeConfig, load
from node.coordinator.config import CoordinatorConfig
from sampler.config import SamplerConfig

RECIPES = DEPLOY / "config" / "recipes"
TASKS = frozenset(TASK_FILES.values())
"""Files that complete the coordinator.toml beside them."""


def roles() -> list[ParameterSet]:
    """Return every process of every recipe: its files, the coordinator once for each of its tasks."""
    found = []
    for recipe in sorted(path for path in RECIPES.iterdir() if path.is_dir()):
        tasks = [path for path in sorted(recipe.glob("*.toml")) if path in TASKS]
        for path in sorted(set(recipe.glob("*.toml")) - set(tasks)):
            name = f"{recipe.name}/{path.stem}"
            if path.stem == "coordinator" and tasks:
                found += [pytest.param([path, task], id=f"{name}+{task.stem}") for task in tasks]
            else:
                found.append(pytest.param([path], id=name))
    return found


def config_of(files: list[Path]) -> NodeConfig:
    role = files[0].stem.partition("-")[0]
    config = load(roles=[role], files=files, environ={}).config
    assert role in config.roles
    return config


@pytest.mark.parametrize("files", roles())
def test_a_recipe_is_the_configuration_of_its_role(files: list[Path]) -> None:
    config = config_of(files)
    assert config.node.tls
    if files[0].stem == "coordinator":
        settings = config.section(CoordinatorConfig)
        assert settings.buffer_groups >= settings.batch_groups


def test_samplers_of_one_host_share_nothing_but_the_model() -> None:
    files = sorted((RECIPES / "multi-gpu-sampler").glob("*.toml"))
    configs = [config_of([file]) for file in files]
    for place in ("node_id", "state_dir", "token_file"):
        assert len({getattr(config.node, place) for config in configs}) == len(files)
    assert len({config.telemetry.http_listen for config in configs}) == len(files)
    assert len({config.section(SamplerConfig).device for config in configs}) == len(files)


def test_the_buffers_of_several_sites_hold_a_contribution_of_each() -> None:
    files = {path.stem: path for path in (RECIPES / "several-sites").glob("*.toml")}
    run = config_of([files["coordinator"]]).section(CoordinatorConfig)
    learner = config_of([files["learner"]]).section(LearnerConfig)
    contributors = [config_of([file]) for name, file in files.items() if name.startswith("contributor")]
    assert learner.merge is not None
    needed = len(contributors) * run.batch_groups * learner.merge.local_steps
    assert min(run.buffer_groups, run.concurrency_groups, learner.buffer_groups) >= needed
    port = learner.merge.listen.rpartition(":")[2]
    assert {one.section(ContributorConfig).learner for one in contributors} == {f"hub.example.org:{port}"}
    assert len({one.node.node_id for one in contributors}) == len(contributors)


def test_every_recipe_is_in_the_list_and_says_what_to_expect() -> None:
    listed = (RECIPES / "README.md").read_text()
    for recipe in (path for path in RECIPES.iterdir() if path.is_dir()):
        assert f"[{recipe.name}]({recipe.name})" in listed
