"""A real run with contributors: every process accepts the recipe with what the run adds."""

import tomllib
from pathlib import Path

from deploy.real.real_plan import MERGE, TASK_FILES, Plan, additions
from deploy.runs.run_directory import COORDINATOR, LEARNER, Ports, RunDirectory, role_of, to_toml
from learner.config import LearnerConfig
from learner.contributor.config import ContributorConfig
from node.config.settings import NodeConfig, load


def test_contributors_train_what_the_recipes_learner_merges(tmp_path: Path) -> None:
    plan = Plan(
        model=tmp_path,
        task_file=TASK_FILES["jsonl"],
        engines=("torch",),
        seed=0,
        seconds=60.0,
        gain=0.4,
        contributors=2,
        method="word_changes",
    )
    peers = (COORDINATOR, LEARNER, *plan.samplers, *plan.contributor_names)
    ports = Ports.free(peers, others=(MERGE,))
    documents = additions(plan, RunDirectory(tmp_path / "real-1"), ports)

    def config(name: str) -> NodeConfig:
        path = tmp_path / f"{name}.toml"
        path.write_text(to_toml(documents[name]))
        files = [*plan.recipe_files.get(name, ()), path]
        return load(roles=[role_of(name)], files=files, environ={}).config

    learner = config(LEARNER).section(LearnerConfig)
    assert learner.merge is not None
    assert (learner.merge.method, learner.merge.local_steps) == (plan.method, 4)
    assert (
        learner.learning_rate
        == tomllib.loads(plan.recipe_files[LEARNER][0].read_text())["learner"]["learning_rate"]
    )
    for name in plan.contributor_names:
        contributor = config(name).section(ContributorConfig)
        assert contributor.learner == learner.merge.listen
        assert contributor.compute_dtype == learner.compute_dtype
