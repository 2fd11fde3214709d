import pytest

from node.values.groups.failure import Failure
from sampler.tasks.processes.grader_requests import TaskError
from support.graded_texts import grading, texts
from support.refusals import naming


async def test_a_grader_that_raises_fails_its_group_only_and_says_where_with_the_traceback_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with grading("support.unruly_tasks:Raising") as grader:
        with naming(TaskError, "RuntimeError", "unruly_tasks.py", "no such answer"):
            await grader.grade(1, texts("x"))
        assert (await grader.grade(0, texts("x"))).rewards == [1.0]
        assert grader.process.incarnation == 1
    [logged] = [vars(record) for record in caplog.records if record.message == "task raised"]
    assert (logged["who"], logged["prompt_index"]) == ("the grader", 1)
    assert logged["traceback"].startswith("Traceback (most recent call last):")
    assert 'raise RuntimeError("no such answer")' in logged["traceback"]


async def test_what_a_grader_prints_is_an_event_each_line_and_forges_none(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("INFO")
    forged = '{"event": "step", "level": "info"}'
    async with grading("support.unruly_tasks:Printing") as grader:
        await grader.grade(1, texts(f"\x1b[2Jcleared\n{forged}"))
    told = [vars(record) for record in caplog.records if record.message == "printed"]
    assert [(one["program"], one["text"]) for one in told] == [
        ("grader of support.unruly_tasks:Printing", "graded \\x1b[2Jcleared"),
        ("grader of support.unruly_tasks:Printing", forged),
    ]
    assert capfd.readouterr() == ("", "")


ODD = [
    r"returned nan as a reward, which must be within -1e\+06 and 1e\+06 \(Odd\.grade, completion 0\)",
    r"returned 1e\+39 as a reward, which must be within",
    r"returned inf as metric 'words', which must be within -1e\+12 and 1e\+12",
    r"'Words!' for metrics\.Words!\.\[key\]: String should match pattern",
    r"for metrics: Dictionary should have at most 16 items",
    r"abstained from all 1 completions",
    r"returned 'right' \(str\) as a reward \(Odd\.grade, completion 0\); return a number, None to abstain",
    r"returned \{'score': 1\.0\} \(dict\) as a reward",
    r"returned \(1\.0, 2\.0, 3\.0\) \(Odd\.grade, completion 0\)",
    r"raised ZeroDivisionError at unruly_tasks\.py:\d+: division by zero \(Odd\.grade, completion 0\)",
]


async def test_what_is_no_reward_or_metric_is_refused_by_name() -> None:
    async with grading("support.unruly_tasks:Odd") as grader:
        for number, said in enumerate(ODD):
            with pytest.raises(TaskError, match=f"the grader .*{said}") as error:
                await grader.grade(number, texts("x"))
            assert error.value.fault is Failure.GRADING_FAILED


async def test_a_grader_may_abstain_and_may_be_a_coroutine() -> None:
    async with grading("support.unruly_tasks:Abstaining") as grader:
        grades = await grader.grade(0, texts("yes", "no", "perhaps"))
        assert grades.rewards == [1.0, 0.0, None]
        assert grades.metrics == {"sure": [1.0, 1.0, None]}
        with naming(TaskError, "KeyError", "unruly_tasks.py", "'well'", "completion 1"):
            await grader.grade(0, texts("yes", "well"))
