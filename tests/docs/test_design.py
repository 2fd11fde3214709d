"""DESIGN.md and the DECISIONS.md files: true to the tree, within their bounds, in their own words."""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DESIGN = ROOT / "DESIGN.md"
MOST_LINES = 400
MOST_WORDS = 40
MOST_DECISION_LINES = 25

KEPT = re.compile(r"(heterorl_sampler_)?outbox_groups")
"""A configuration key and a metric, which operators' files and dashboards name."""

TRACKED = [
    ROOT / name
    for name in subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
]
PROSE_AND_CODE = [
    path
    for path in TRACKED
    if path.suffix in {".py", ".proto", ".md", ".toml", ".yml", ".json", ".h", ".c"} and path != DESIGN
]
DECISIONS = [path for path in TRACKED if path.name == "DECISIONS.md"]


def table(heading: str) -> list[tuple[str, str]]:
    """Return the rows of the table whose header begins with ``heading``."""
    rows: list[tuple[str, str]] = []
    lines = iter(DESIGN.read_text().splitlines())
    for line in lines:
        if line.startswith(f"| {heading} |"):
            next(lines)
            for row in lines:
                if not row.startswith("| "):
                    return rows
                left, right = row.strip("| ").split(" | ", 1)
                rows.append((left, right))
    return rows


@cache
def words_of(path: Path) -> set[str]:
    """Return every word of code and prose, identifiers both whole and taken apart."""
    identifiers = set(re.findall(r"[A-Za-z][A-Za-z_]+", KEPT.sub("", path.read_text())))
    parts = {
        part.lower()
        for identifier in identifiers
        for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)
    }
    return {identifier.lower() for identifier in identifiers} | parts


def test_design_is_short() -> None:
    assert len(DESIGN.read_text().splitlines()) <= MOST_LINES


def test_the_glossary_has_at_most_forty_words() -> None:
    words = [word for row, _ in table("word") for word in row.split(", ")]
    assert 10 < len(words) <= MOST_WORDS
    assert len(set(words)) == len(words)


@pytest.mark.parametrize(("given_up", "say"), table("given up"))
def test_a_word_given_up_is_not_used(given_up: str, say: str) -> None:
    forms = {given_up, f"{given_up}s"}
    users = [str(path.relative_to(ROOT)) for path in PROSE_AND_CODE if forms & words_of(path)]
    assert not users, f"say {say}"


def paths_named(document: Path) -> list[str]:
    """Return what stands in backticks and looks like a path of this repository."""
    named = re.findall(r"`([\w./-]+)`", document.read_text())
    return [
        name
        for name in named
        if re.fullmatch(r"(node|learner|sampler|proto|deploy|bench|tests)/[\w./-]+", name)
    ]


def test_design_lists_every_file_of_decisions() -> None:
    assert DECISIONS
    assert {str(path.relative_to(ROOT)) for path in DECISIONS} <= set(paths_named(DESIGN))


@pytest.mark.parametrize("path", DECISIONS, ids=lambda path: str(path.relative_to(ROOT)))
def test_decisions_are_short_and_newest_first(path: Path) -> None:
    entries = re.split(r"^(?=## )", path.read_text(), flags=re.MULTILINE)[1:]
    dates = [entry[3:13] for entry in entries]
    assert all(re.fullmatch(r"20\d\d-\d\d-\d\d", date) for date in dates)
    assert dates == sorted(dates, reverse=True)
    too_long = [e.splitlines()[0] for e in entries if len(e.strip().splitlines()) > MOST_DECISION_LINES]
    assert not too_long
