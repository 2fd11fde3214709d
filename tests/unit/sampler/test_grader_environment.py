import os

import pytest

from sampler.tasks.task import TaskSetup
from support.graded_texts import grading, setup_of


async def told(setup: TaskSetup) -> str:
    """Return the first prompt of a task in a process of its own."""
    async with grading(setup) as grader:
        return str((await grader.pool.prompt(0)).content)


def telling(variable: str, *, environment: tuple[str, ...] = ()) -> TaskSetup:
    return setup_of(
        "telling",
        {"variable": variable},
        custom_tasks={"telling": "support.unruly_tasks:Telling"},
        grader_environment=environment,
    )


@pytest.mark.parametrize(
    "variable", ["HF_TOKEN", "OPENAI_API_KEY", "HETERORL_NODE__TOKEN_FILE", "HTTPS_PROXY"]
)
async def test_a_run_whose_argument_names_a_variable_does_not_learn_the_samplers_secret(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "a secret")
    assert await told(telling(variable)) == "nothing"


@pytest.mark.parametrize(
    "variable", ["PATH", "HOME", "LC_NUMERIC", "HF_HOME", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"]
)
async def test_graders_have_the_variables_that_programs_need(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, os.environ.get(variable, "9"))
    assert await told(telling(variable)) == os.environ[variable]


async def test_graders_have_the_variables_that_the_samplers_owner_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_DICTIONARY", "/srv/words")
    assert await told(telling("MY_DICTIONARY", environment=("MY_DICTIONARY",))) == "/srv/words"


@pytest.mark.parametrize(("grader", "has_key"), [("judge", True), ("exact", False)])
def test_the_judges_key_is_only_where_the_judge_is_asked(
    grader: str, has_key: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-1")
    judge = {"url": "http://127.0.0.1:1/v1", "models": ["wise"], "api_key_env": "JUDGE_KEY", "timeout_s": 5}
    asked = {"model": "wise", "template": "{completion}", "score_key": "score"}
    setup = setup_of(
        "jsonl",
        {"grader": grader} | ({"judge": asked} if has_key else {}),
        judge=judge,
    )
    assert ("JUDGE_KEY" in setup.environment) is has_key
