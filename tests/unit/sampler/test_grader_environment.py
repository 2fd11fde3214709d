import os

import pytest

from support.graded_texts import grading, setup_of

SECRETS = ("HF_TOKEN", "OPENAI_API_KEY", "HETERORL_NODE__TOKEN_FILE", "HTTPS_PROXY")
USUAL = ("PATH", "HOME", "LC_NUMERIC", "HF_HOME", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")


async def test_graders_have_what_programs_need_and_what_the_owner_names_and_no_secret_that_a_run_asks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, "a secret")
    for name in USUAL:
        monkeypatch.setenv(name, os.environ.get(name, "9"))
    monkeypatch.setenv("MY_DICTIONARY", "/srv/words")
    asked = [*SECRETS, *USUAL, "MY_DICTIONARY"]
    setup = setup_of(
        "telling",
        {"variables": asked},
        custom_tasks={"telling": "support.unruly_tasks:Telling"},
        grader_environment=("MY_DICTIONARY",),
    )
    async with grading(setup) as grader:
        told = {name: (await grader.pool.prompt(index)).content for index, name in enumerate(asked)}
    assert told == {
        **dict.fromkeys(SECRETS, "nothing"),
        **{name: os.environ[name] for name in USUAL},
        "MY_DICTIONARY": "/srv/words",
    }


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
