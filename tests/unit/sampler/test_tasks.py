import pytest

from node.errors import ConfigError
from sampler.tasks.addition import AdditionTask
from sampler.tasks.task import BUILT_IN, import_path, load_task


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_task_can_be_loaded_and_has_prompts(name: str) -> None:
    task = load_task(import_path(name, {}))
    assert task.prompts >= 1
    assert task.prompt(0)


def test_addition_covers_every_pair_of_digits_once() -> None:
    task = AdditionTask()
    prompts = [task.prompt(index) for index in range(task.prompts)]
    assert len(set(prompts)) == 100
    assert prompts[37] == "3+7="


@pytest.mark.parametrize(
    ("text", "reward"), [("10", 1.0), ("1", 0.0), ("100", 0.0), (" 10", 0.0), ("", 0.0), ("10=", 0.0)]
)
def test_addition_rewards_the_exact_sum_only(text: str, reward: float) -> None:
    assert AdditionTask().grade(37, text) == reward


def test_a_custom_task_is_found_by_its_configured_path() -> None:
    path = import_path("mine", {"mine": "support.unruly_tasks:Printing"})
    assert load_task(path).prompt(4) == "4="


def test_a_name_off_the_wire_is_never_an_import_path() -> None:
    with pytest.raises(ConfigError, match="this sampler knows the tasks addition"):
        import_path("support.unruly_tasks:Printing", {})


@pytest.mark.parametrize(
    "path", ["nowhere:Task", "support.unruly_tasks:Nobody", "support.unruly_tasks:Broken", ""]
)
def test_a_task_that_cannot_be_made_is_a_configuration_error(path: str) -> None:
    with pytest.raises(ConfigError, match=r"package\.module:ClassName"):
        load_task(path)
