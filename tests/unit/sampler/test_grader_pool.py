"""Real processes: what hangs holds up nothing else, and what a process remembers stays with it."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from node.values.groups.failure import Failure
from sampler.tasks.processes.grader_pool import GraderPool
from sampler.tasks.processes.grader_process import Grader
from sampler.tasks.processes.grader_requests import TaskError, TaskUnusableError
from sampler.tasks.task import CompletionText, TaskSetup
from support.bad_prompts import GO, HELD, PLACE
from support.graded_texts import grader_of, texts
from support.refusals import naming
from support.waiting import until

Make = Callable[..., GraderPool]


@pytest_asyncio.fixture
async def make() -> AsyncIterator[Make]:
    made: list[GraderPool] = []

    def make_pool(task: str, *, most: int = 3, wall_limit_s: float = 30, slow_s: float = 0.05) -> GraderPool:
        pool = GraderPool(
            lambda: grader_of(
                TaskSetup(
                    f"support.bad_prompts:{task}" if ":" not in task else task, {}, environment=[PLACE]
                ),
                wall_limit_s=wall_limit_s,
            ),
            most=most,
            slow_s=slow_s,
        )
        made.append(pool)
        return pool

    yield make_pool
    for pool in made:
        await pool.close()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where held prompts say that they began, and are let go."""
    monkeypatch.setenv(PLACE, str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("support.unruly_tasks:Broken", "no data"),
        ("nowhere:Task", "nowhere"),
        ("support.bad_prompts:Empty", "prompts is 0"),
    ],
)
async def test_what_is_no_task_is_said_at_the_start(make: Make, task: str, said: str) -> None:
    with naming(TaskUnusableError, said):
        await make(task).start()


async def test_a_task_that_answers_at_once_is_served_by_one_process(make: Make) -> None:
    pool = make("Fine", slow_s=5.0)
    description = await pool.start()
    assert (description.prompts, description.max_turns, description.is_stateful) == (20, 1, False)
    prompts = await asyncio.gather(*(pool.prompt(index) for index in range(20)))
    assert [prompt.content for prompt in prompts] == [f"{index}=" for index in range(20)]
    rewards = await asyncio.gather(*(pool.grade(prompts[n], texts("x" * n, "x", "")) for n in range(20)))
    assert [group.rewards for group in rewards] == [[float(n % 2), 1.0, 0.0] for n in range(20)]
    assert (pool.processes, pool.waiting) == (1, 0)


async def test_slow_prompts_are_made_side_by_side(make: Make, place: Path) -> None:
    pool = make("HeldPrompts")
    held = [asyncio.create_task(pool.prompt(index)) for index in HELD]
    await until(lambda: len(list(place.iterdir())) == len(HELD))
    assert pool.processes == len(HELD)
    (place / GO).touch()
    await asyncio.gather(*held)


def hold_up_the_event_loop(file: Path) -> None:
    """Return long after a process has left ``file``, and its answer is there."""
    while not file.exists():
        time.sleep(0.01)
    time.sleep(0.2)


async def test_a_late_event_loop_is_not_taken_for_a_slow_process(place: Path) -> None:
    made: list[Grader] = []

    def make_one() -> Grader:
        made.append(grader_of(TaskSetup("support.bad_prompts:HeldPrompts", {}, environment=[PLACE])))
        return made[-1]

    pool = GraderPool(make_one, most=3, slow_s=0.01)
    await pool.start()
    (place / GO).touch()
    asked = asyncio.create_task(pool.prompt(1))
    await asyncio.sleep(0)
    hold_up_the_event_loop(place / "1")
    await asked
    await pool.close()
    assert len(made) == 1


async def test_what_hangs_holds_up_no_other_request(make: Make) -> None:
    pool = make("OneTooLongOneHangs", wall_limit_s=20)
    prompt = await pool.prompt(11)
    hanging = asyncio.create_task(pool.grade(prompt, texts("x")))
    async with asyncio.timeout(10):
        for index in (2, 3, 4):
            assert (await pool.grade(await pool.prompt(index), texts("x"))).rewards == [1.0]
    assert not hanging.done()
    hanging.cancel()
    await asyncio.wait({hanging})
    assert (await pool.grade(await pool.prompt(2), texts("x"))).rewards == [1.0]


async def test_there_are_never_more_processes_than_allowed_and_gradings_go_first(
    make: Make, place: Path
) -> None:
    pool = make("HeldPrompts", most=1)
    prompt = await pool.prompt(0)
    order: list[str] = []

    async def ask(name: str, request: Awaitable[object]) -> None:
        await request
        order.append(name)

    async with asyncio.TaskGroup() as asking:
        asking.create_task(ask("prompt 1", pool.prompt(1)))
        asking.create_task(ask("prompt 2", pool.prompt(2)))
        asking.create_task(ask("grading", pool.grade(prompt, texts("x"))))
        await until(lambda: pool.waiting == 2 and (place / "1").exists())
        (place / GO).touch()
    assert order == ["prompt 1", "grading", "prompt 2"]
    assert pool.processes == 1


async def test_a_prompt_that_cannot_be_had_says_why_and_the_next_one_comes(
    make: Make,
) -> None:
    pool = make("EachBad", wall_limit_s=1.0, most=1)
    for index, (fault, said) in enumerate(
        [
            (Failure.PROMPT_FAILED, r"LookupError at \w+\.py:\d+: no row 0"),
            (Failure.PROMPT_TIMED_OUT, r"killed after 1\.0 s"),
            (Failure.PROMPT_FAILED, "returned int, not a text"),
            (Failure.PROMPT_FAILED, "UnicodeEncodeError"),
            (Failure.PROMPT_TOO_LONG, "5000000 characters"),
            (Failure.PROMPT_FAILED, "died"),
        ]
    ):
        with pytest.raises(TaskError, match=said) as error:
            await pool.prompt(index)
        assert error.value.fault is fault
        assert (await pool.prompt(6)).content == "6="


async def test_messages_are_taken_as_data_sets_have_them_with_tools_of_their_own(
    make: Make,
) -> None:
    pool = make("Talks", most=1)
    called, parts = await pool.prompt(0), await pool.prompt(1)
    assert called.content[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "f", "arguments": {}}}],
    }
    assert called.template_arguments == {"tools": [{"name": "tool 0"}]}
    assert parts.content == [{"role": "user", "content": "hi", "weight": 1}]
    for index, said in enumerate(("content null and no tool_calls", "an empty list", "as ShareGPT has"), 2):
        with pytest.raises(TaskError, match=rf"prompt\(\) returned messages, and the list .*{said}") as error:
            await pool.prompt(index)
        assert error.value.fault is Failure.PROMPT_FAILED


async def test_who_made_a_prompt_grades_it_where_the_task_remembers(make: Make) -> None:
    pool = make("Drawn", most=2)
    assert (await pool.start()).is_stateful
    prompts = [await pool.prompt(index) for index in range(5)]
    for index, prompt in reversed(list(enumerate(prompts))):
        (reward,) = (await pool.grade(prompt, texts("x"))).rewards
        assert prompt.content == f"{index}+{reward:.0f}="


async def test_what_a_killed_process_remembered_is_nobodys_fault(make: Make) -> None:
    pool = make("Drawn", most=1, wall_limit_s=0.5)
    await pool.start()
    prompt = await pool.prompt(3)
    with naming(TaskError, "killed"):
        await pool.grade(await pool.prompt(-1), texts("hang"))
    with naming(TaskError, "ended") as error:
        await pool.grade(prompt, texts("x"))
    assert error.value.fault is None


async def test_requests_that_are_cancelled_leave_their_place(make: Make, place: Path) -> None:
    pool = make("HeldPrompts", most=1)
    first, second, third = (asyncio.create_task(pool.prompt(index)) for index in (1, 2, 3))
    await until(lambda: pool.waiting == 2 and (place / "1").exists())
    second.cancel()
    (place / GO).touch()
    assert (await first).content == "1="
    assert (await third).content == "3="
    assert second.cancelled()
    assert pool.waiting == 0


GAME = "support.guessing_task:Guessing"


def said(*turns: str) -> list[dict[str, str]]:
    return [{"role": ("assistant", "user")[n % 2], "content": text} for n, text in enumerate(turns)]


async def test_a_task_replies_to_a_conversation_until_it_is_over(make: Make) -> None:
    pool = make(GAME)
    assert (await pool.start()).max_turns == 4
    prompt = await pool.prompt(5)
    assert await pool.reply(prompt, said("3")) == " higher"
    assert await pool.reply(prompt, said("3", " higher", "77")) == " lower"
    assert await pool.reply(prompt, said("5")) is None
    text = CompletionText("5", 3, "end", tuple(said("3", " higher", "5")))
    grades = await pool.grade(prompt, [text])
    assert grades.rewards == [1.0]
    assert grades.metrics == {"turns": [2.0], "drawn": [3.0]}


async def test_a_task_of_texts_may_reply(make: Make) -> None:
    pool = make("support.guessing_task:Short")
    description = await pool.start()
    assert (description.max_turns, description.is_stateful) == (7, True)
    prompt = await pool.prompt(2)
    assert await pool.reply(prompt, said("x")) == [{"role": "tool", "content": "2: x"}]
    assert await pool.reply(prompt, said("x", "y", "z")) is None
    assert (await pool.grade(prompt, texts("four"))).rewards == [4.0]


async def test_a_bound_on_turns_is_a_number_within_reason(make: Make) -> None:
    with naming(TaskUnusableError, "max_turns", "1000000", "1024"):
        await make("support.guessing_task:Endless").start()


@pytest.mark.parametrize(
    ("task", "fault", "words"),
    [
        (
            "ReplyRaises",
            Failure.GRADING_FAILED,
            r"reply\(\) raised RuntimeError at guessing_task\.py:\d+: no words",
        ),
        ("ReplyHangs", Failure.GRADING_TIMED_OUT, r"reply\(\) was killed after 0.3 s"),
    ],
)
async def test_a_reply_that_fails_says_why_and_the_next_is_given(
    make: Make, task: str, fault: Failure, words: str
) -> None:
    pool = make(f"support.guessing_task:{task}", wall_limit_s=0.3, most=1)
    prompt = await pool.prompt(3)
    with pytest.raises(TaskError, match=words) as error:
        await pool.reply(prompt, said("1"))
    assert error.value.fault is fault
    assert await pool.reply(await pool.prompt(4), said("1")) == " higher"
