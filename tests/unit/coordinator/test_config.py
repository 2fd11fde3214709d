from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from node.coordinator.config import CoordinatorConfig
from node.tasks.task_options import checked_options
from node.values.groups.sampling_parameters import SamplingParameters
from support.present import present
from support.refusals import naming

JUDGE = {"model": "wise", "score_key": "score"}


def config(**values: object) -> CoordinatorConfig:
    return CoordinatorConfig.model_validate({"task": "addition", "prompts": 100, **values})


def test_the_defaults_are_a_coherent_small_run() -> None:
    assert config().sampling == SamplingParameters(1.0, 1.0, 0, 32)
    assert config().terms("run", prompts=100).bounds.batch_groups == 8


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("prompts", 0),
        ("group_size", 1),
        ("group_size", 1025),
        ("temperature", 0.0),
        ("temperature", 0.009),
        ("temperature", 2.1),
        ("top_p", 1.5),
        ("min_p", 1.5),
        ("stop", ["x"] * 17),
        ("max_staleness_versions", -1),
        ("listen", "nowhere"),
        ("lease_ttl_s", 0),
        ("bucket", "file:///srv/weights"),
        ("bucket", "https://example.org/weights"),
        ("bucket", "s3://"),
        ("bucket", "s3://name/prefix?endpoint=elsewhere"),
        ("unknown", 1),
    ],
)
def test_a_value_out_of_its_bounds_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ValidationError) as error:
        config(**{key: value})
    assert error.value.errors()[0]["loc"] == (key,)


@pytest.mark.parametrize(
    "url", ["s3://name", "s3://name/some/prefix/", "gs://name/prefix", "az://container/p"]
)
def test_a_bucket_needs_the_package_that_fills_it(url: str) -> None:
    assert config().needed_packages == ()
    (needed,) = config(bucket=url).needed_packages
    assert (needed.key, needed.package, needed.extra) == ("coordinator.bucket", "obstore", "objects")


def test_a_stop_string_has_1_to_64_characters() -> None:
    assert config(stop=["日" * 64]).sampling.stop == ("日" * 64,)
    for wrong in ("", "x" * 65):
        with pytest.raises(ValidationError) as error:
            config(stop=[wrong])
        assert error.value.errors()[0]["loc"] == ("stop", 0)


def test_a_buffer_that_can_never_fill_a_batch_is_refused() -> None:
    with naming(ValidationError, "buffer_groups", "batch_groups"):
        config(buffer_groups=7, batch_groups=8)


def test_a_lease_that_one_late_heartbeat_would_end_is_refused() -> None:
    with naming(ValidationError, "lease_ttl_s", "heartbeat"):
        config(lease_ttl_s=3, heartbeat_interval_s=2)


def test_every_setting_says_what_moving_it_does() -> None:
    assert all(field.description or name == "task" for name, field in CoordinatorConfig.model_fields.items())


ROWS = {"file": "questions.jsonl"}


def problem(**values: object) -> str:
    """Return what is said of a wrong configuration."""
    with pytest.raises(ValidationError) as error:
        CoordinatorConfig.model_validate(values)
    (details,) = error.value.errors()
    return f"{'.'.join(map(str, details['loc']))}: {details['msg']}"


def test_the_options_of_a_built_in_task_are_checked_where_they_are_written() -> None:
    assert problem(task="jsonl", data=ROWS, task_options={"promt": "q"}).startswith(
        "task_options: Value error, promt: task 'jsonl' has no such option, known are system"
    )
    assert (
        "grader: must be code, contains, exact, judge, math_verify, number, or package.module:function"
        in problem(task="jsonl", data=ROWS, task_options={"grader": "exakt"})
    )
    judge = {"model": "wise", "template": "{completion}", "score_key": "score"}
    for wrong, said in [
        (None, "task_options: Value error, grader = 'judge' and the table judge go together"),
        (judge | {"template": "Rate it."}, "judge.template: must have {completion}"),
        (judge | {"score_pattern": "(1)"}, "judge: set either score_pattern or score_key"),
        (
            judge | {"score_key": None, "score_pattern": "(1"},
            "judge.score_pattern: is not a regular expression",
        ),
        (judge | {"score_key": None, "score_pattern": "1"}, "must have a group for the score"),
        (judge | {"lowest": 10}, "lowest = 10.0 must be below highest = 10.0"),
        (
            judge | {"url": "http://evil"},
            "judge.url: task 'jsonl' has no such option, known are model, template",
        ),
    ]:
        assert said in problem(task="jsonl", data=ROWS, task_options={"grader": "judge", "judge": wrong})
    for code, said in [
        ({"tests": "unittest"}, "code.tests: Input should be 'asserts' or 'stdin'"),
        ({"time_limit_s": 0}, "code.time_limit_s: Input should be greater than or equal to 1"),
        ({"network": True}, "code.network: task 'jsonl' has no such option, known are tests, setup"),
    ]:
        assert said in problem(task="jsonl", data=ROWS, task_options={"grader": "code", "code": code})
    assert problem(task="reasoning_gym") == "task_options: Value error, dataset: Field required"
    assert "known are none" in problem(task="addition", task_options={"digits": 2})
    assert "at most 65536" in problem(task="mine", task_options={"text": "x" * 70_000})
    assert "JSON compliant" in problem(task="mine", task_options={"rate": float("nan")})


def test_a_custom_task_has_its_own_options() -> None:
    options = {"level": 3, "names": ["a", "b"], "table": {"x": 0.5, "on": True}}
    assert CoordinatorConfig.model_validate({"task": "mine", "task_options": options}).task_options == options


def test_rows_are_for_the_tasks_that_take_them() -> None:
    assert "needs rows: write [coordinator.data]" in problem(task="jsonl")
    assert "leave [coordinator.data] out" in problem(task="addition", data=ROWS)
    assert "leave prompts out" in problem(task="jsonl", data=ROWS, prompts=10)
    assert problem(task="jsonl", data={"file": "x", "rows": 3}).startswith("data.rows: Extra inputs")
    assert CoordinatorConfig.model_validate({"task": "mine", "data": ROWS}).data is not None


def evaluated(**values: object) -> dict[str, object]:
    return {"task": "addition", "prompts": 100, "evaluation": {"every_versions": 10, "prompts": 20} | values}


def test_held_out_prompts_are_sampled_as_configured_and_otherwise_as_the_run() -> None:
    greedy = CoordinatorConfig.model_validate(evaluated() | {"temperature": 0.7, "stop": ["#"]})
    settings = greedy.evaluation_settings
    assert settings.sampling == replace(greedy.sampling, temperature=1.0, top_k=1)
    assert (settings.temperature, settings.completions, settings.held_out_prompts) == (0.0, 1, 20)
    random = CoordinatorConfig.model_validate(evaluated(temperature=0.7, completions=4, max_new_tokens=64))
    settings = random.evaluation_settings
    assert settings.sampling == SamplingParameters(0.7, 1.0, 0, 64)
    assert (settings.temperature, settings.completions) == (0.7, 4)


def test_evaluations_under_other_options_of_the_task_are_told_apart() -> None:
    def seen(**options: object) -> str:
        values = {**evaluated(), "task": "custom", "task_options": options}
        return CoordinatorConfig.model_validate(values).evaluation_settings.task_options

    assert seen() == ""
    assert seen(a=1, b=[True]) == seen(b=[True], a=1)
    assert len({"", seen(a=1), seen(a=2), seen(b=1)}) == 4


def test_an_evaluation_that_cannot_be_is_refused_before_anything_starts() -> None:
    assert problem(**evaluated(prompts=100)).endswith(
        "prompts = 100, of which evaluation.prompts = 100 are held out: none is left to train on; "
        "lower evaluation.prompts"
    )
    assert "are the same completion every time" in problem(**evaluated(completions=2))
    assert problem(**evaluated(prompts=0)).startswith("evaluation.prompts: Input should be greater")
    assert problem(**evaluated(temperature=-1)).startswith("evaluation.temperature: Input should be greater")
    assert "temperature = 0.001 must be 0 or at least 0.01" in problem(**evaluated(temperature=0.001))
    assert problem(**evaluated(every=3)).startswith("evaluation.every: Extra inputs are not permitted")
    assert problem(task="addition", evaluation={"prompts": 3}).startswith(
        "evaluation.every_versions: Field req"
    )
    rows = {"file": "x.jsonl", "evaluation_rows": 19}
    assert "set data.evaluation_rows = 20" in problem(
        **evaluated() | {"task": "mine", "prompts": None, "data": rows}
    )


def test_verifiers_grade_in_a_run_without_evaluation_and_that_makes_it_another_task() -> None:
    graded = config(graded_by="verifier")
    terms = graded.terms("run", prompts=100)
    assert (terms.work.verifiers_grade, terms.bounds.verifiers_grade) == (True, True)
    assert graded.task_digest != config().task_digest
    with naming(ValidationError, "graded_by"):
        config(graded_by="verifier", evaluation={"every_versions": 4, "prompts": 10})
    config(graded_by="verifier", evaluation={"every_versions": 0, "prompts": 10})


def test_an_evaluation_that_is_off_holds_nothing_out() -> None:
    config = CoordinatorConfig.model_validate(evaluated(every_versions=0, prompts=100))
    assert config.evaluation_settings.held_out_prompts == 0


def test_held_out_rows_are_those_of_the_data() -> None:
    rows = {"file": "x.jsonl", "evaluation_rows": 30}
    config = CoordinatorConfig.model_validate(evaluated() | {"task": "mine", "prompts": None, "data": rows})
    assert config.evaluation_settings.held_out_prompts == 0


@pytest.mark.parametrize(
    ("options", "columns"),
    [
        ({}, {"prompt": "prompt", "answer": "answer"}),
        ({"messages": "chat", "answer": "sum"}, {"messages": "chat", "answer": "sum"}),
        ({"grader": "mine:grade"}, {"prompt": "prompt"}),
        ({"grader": "judge", "judge": {**JUDGE, "template": "{completion}"}}, {"prompt": "prompt"}),
        (
            {"grader": "judge", "judge": {**JUDGE, "template": "{answer} {completion}"}},
            {"prompt": "prompt", "answer": "answer"},
        ),
    ],
)
def test_rows_need_the_columns_that_prompt_and_grader_read(
    options: dict[str, Any], columns: dict[str, str]
) -> None:
    assert present(checked_options("jsonl", options)).columns == columns


@pytest.mark.parametrize("task", ["ranking", "jsonl"])
def test_the_longest_prompt_is_what_the_tasks_options_say(task: str) -> None:
    said = {"task": task, "data": ROWS, "task_options": {"max_prompt_tokens": 99}}
    config = CoordinatorConfig.model_validate(said)
    assert config.prompt_tokens == 99
