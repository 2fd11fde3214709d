import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from node.questions import number_text, right_answer
from sampler.tasks.code_digest import _modules
from sampler.tasks.processes.grader_pool import GraderPool
from sampler.tasks.processes.grader_requests import TaskChangedError
from sampler.tasks.task import TaskSetup
from support.graded_texts import grader_of, grading, texts
from support.refusals import naming

GRADE = "import own_words\n\ndef grade(row, completion):\n    return own_words.worth(completion.text)\n"
WORTH = "def worth(text):\n    return 1.0\n"
JSONL = "sampler.tasks.question_tasks:JsonlTask"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with a grader of one's own, and a helper that it imports."""
    (tmp_path / "own_grader.py").write_text(GRADE)
    (tmp_path / "own_words.py").write_text(WORTH)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


async def digest(path: str = JSONL, **options: Any) -> bytes:
    async with grading(TaskSetup(path, options)) as grader:
        return (await grader.process.describe()).code_digest


async def test_the_digest_is_of_the_code_wherever_it_lies_and_of_each_line_of_a_grader_and_its_helper(
    own: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [await digest(grader="own_grader:grade"), await digest(grader="exact")]
    assert {len(one) for one in found} == {16}
    there = Path(shutil.copytree(own, tmp_path_factory.mktemp("elsewhere") / "code"))
    monkeypatch.setattr(sys, "path", [str(there), *sys.path[1:]])
    assert await digest(grader="own_grader:grade") == found[0]
    for file in ("own_grader.py", "own_words.py"):
        with (there / file).open("a") as code:
            code.write("# stricter\n")
        found.append(await digest(grader="own_grader:grade"))
    assert len(set(found)) == 4


async def test_a_grader_edited_while_it_runs_grades_nothing_more_once_its_process_is_another(
    own: Path,
) -> None:
    setup = TaskSetup(JSONL, {"grader": "own_grader:grade"})
    pool = GraderPool(lambda: grader_of(setup), most=1)
    try:
        await pool.start()
        prompt = await pool.prompt(0, '{"prompt": "a"}')
        (own / "own_words.py").write_text(WORTH.replace("1.0", "0.5"))
        # The process that runs has loaded its code.
        assert (await pool.grade(prompt, texts("x"))).rewards == [1.0]
        await prompt.grader.close()
        with naming(TaskChangedError, "digest"):
            await pool.grade(prompt, texts("x"))
    finally:
        await pool.close()


def test_this_software_and_installed_packages_do_not_count_where_a_grader_lies_beside_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = Path(__file__).parents[3]
    beside, helper = ModuleType("own_grader"), ModuleType("own_words")
    beside.__file__, helper.__file__ = str(root / "own_grader.py"), str(root / "deploy" / "check.py")
    monkeypatch.setitem(sys.modules, "own_grader", beside)
    monkeypatch.setitem(sys.modules, "own_words", helper)
    names = {name for name, _ in _modules({"own_grader", "node.questions"})}
    assert {"own_grader", "own_words"} <= names
    packages = {name.partition(".")[0] for name in names}
    assert packages.isdisjoint({"sampler", "learner", "heterorl", "numpy", "pytest"})
    # Two samplers that read another number from a row give other rewards.
    assert {right_answer.__name__, number_text.__name__} <= names
    assert all(name.startswith("node.questions") for name in names if name.startswith("node"))
