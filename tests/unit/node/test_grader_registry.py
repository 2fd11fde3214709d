"""Graders are found by their names: those of this package because they are there, others by entry points."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from node.errors import ConfigError
from node.grading import registry
from node.grading.grader import AnswerGrader
from node.grading.jsonl_options import JsonlOptions
from node.questions.data_row import RowError
from node.tasks.task_options import checked_options
from support.graded_texts import grading, setup_of, texts

ACME = """
from pydantic import BaseModel
from node.grading.grader import AnswerGrader
from node.questions.data_row import RowError

class Lengths(BaseModel):
    least: int

class LengthGrader(AnswerGrader):
    table = Lengths
    noise_ratio = 0.0

    def check_row(self, row):
        if "easy" in row:
            raise RowError("easy", "is too easy")

    def grade(self, row, answers):
        return [float(answer is not None and len(answer) >= self.options.least) for answer in answers]
"""
OPTIONS: dict[str, Any] = {"grader": "acme", "acme": {"least": 3}}


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Install a package with a grader, as pip would; return its code."""
    metadata = tmp_path / "acme_graders-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-graders\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[heterorl.graders]\nacme = acme_graders:LengthGrader\n")
    (code := tmp_path / "acme_graders.py").write_text(ACME)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    registry.installed.cache_clear()
    yield code
    registry.installed.cache_clear()
    sys.modules.pop("acme_graders", None)


@pytest.mark.parametrize("name", registry.built_in())
def test_every_module_beside_the_graders_is_one_and_says_what_it_rewards(name: str) -> None:
    grader = registry.grader_class(name)
    assert issubclass(grader, AnswerGrader)
    assert sys.modules[grader.__module__].__doc__


def test_what_another_package_brings_is_a_grader_by_its_name(acme: Path) -> None:
    assert "acme" in registry.installed()
    options = checked_options("jsonl", OPTIONS)
    assert isinstance(options, JsonlOptions)
    options.check_row({"prompt": "?", "answer": "x"})
    with pytest.raises(RowError) as refused:
        options.check_row({"prompt": "?", "answer": "x", "easy": 1})
    assert (refused.value.column, refused.value.rule) == ("easy", "is too easy")


def test_a_table_may_be_left_out_where_each_option_has_a_default(acme: Path) -> None:
    empty = checked_options("jsonl", {"grader": "code", "code": {}})
    assert checked_options("jsonl", {"grader": "code"}) == empty
    with pytest.raises(ValueError, match="acme"):
        checked_options("jsonl", {"grader": "acme"})


async def test_it_grades_where_the_samplers_owner_allows_it_and_its_code_counts(acme: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        setup_of("jsonl", OPTIONS)
    assert (refused.value.key, refused.value.value) == ("coordinator.task_options.grader", "acme")
    setup = setup_of("jsonl", OPTIONS, allowed_graders=("acme",))
    async with grading(setup) as grader:
        assert (await grader.grade(0, texts("ab", "abc"), row='{"answer": "x"}')).rewards == [0.0, 1.0]
        before = (await grader.process.describe()).code_digest
    with acme.open("a") as code:
        code.write("# stricter\n")
    async with grading(setup) as grader:
        assert (await grader.process.describe()).code_digest != before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"grader": "judge"}, "judge"),
        ({"judge": {"model": "m"}}, "judge"),
        ({"code": {}}, "code"),
        ({"grader": "code", "judge": {}}, "judge"),
        ({"grader": "code", "code": {"test": 1}}, "code.test"),
        ({"grader": "code", "code": {"most_tests": 0}}, "code.most_tests"),
        ({"grader": "nothing"}, "grader"),
        ({"grader": 5}, "grader"),
        ({"grader_options": {}}, "a table that bears its name"),
    ],
)
def test_a_wrong_table_is_refused_by_its_key(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        checked_options("jsonl", options)
