"""README, docs/ and the other documents name only files, commands, keys, messages and figures that exist."""

import ast
import importlib.util
import itertools
import json
import pkgutil
import re
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token
from pydantic import BaseModel

from deploy.docs_site import configuration
from learner.objective.menu import MENU
from node.commands.cli import COMMANDS, main
from node.config.setting_table import rows_of
from node.config.settings import SECTIONS as MODELS
from node.coordinator.config import CoordinatorConfig
from node.exit_code import ExitCode
from node.values.roles import ROLES
from support.product_modules import modules

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "docs"
TRACKED: Final = [
    ROOT / name
    for name in subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    if (ROOT / name).exists()
]
MANUAL: Final = [
    path
    for path in TRACKED
    if path.is_relative_to(DOCS) or (path.parent == ROOT and path.name != "CHANGELOG.md")
]
"""Documents whose commands and keys are checked."""

SECTIONS: Final[dict[str, type[BaseModel]]] = {
    name: pkgutil.resolve_name(model) for name, model in MODELS.items()
}
_SECTION: Final = "|".join(SECTIONS)

README_LINES: Final = 240
LEAST_QUOTED: Final = 10
"""Characters between two ``…`` of a quoted message from which on they are looked for."""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


documents = pytest.mark.parametrize("document", TRACKED, ids=name_of)
manual = pytest.mark.parametrize("document", MANUAL, ids=name_of)


def blocks(text: str, *languages: str) -> list[str]:
    """Return the fenced blocks in these languages."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [body for language, body in fenced if language in languages]


def prose(text: str) -> str:
    """Return the text without blocks of code and inline code."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))


def inline_code(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))


def anchors_of(path: Path) -> set[str]:
    """Return the anchors that GitHub and MkDocs make of the headings."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


def linked(document: Path) -> str:
    return re.sub(r"^    .*$", "", prose(document.read_text()), flags=re.MULTILINE)


@documents
def test_every_link_leads_somewhere(document: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", linked(document)):
        if re.match(r"[a-z]+:", target):
            continue
        path = document.parent / target if target else document
        assert path.exists(), target
        if anchor:
            assert anchor in anchors_of(path), f"{target}#{anchor}"


@manual
def test_every_path_named_exists(document: Path) -> None:
    for code in inline_code(document.read_text()):
        if re.fullmatch(r"(node|learner|sampler|proto|deploy|bench|tests|docs)/[\w./-]+", code):
            assert (ROOT / code).exists(), code


@manual
def test_every_test_named_exists(document: Path) -> None:
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", document.read_text()):
        assert f"def {name}(" in (ROOT / file).read_text(), (file, name)


def test_every_promise_of_security_names_a_test() -> None:
    section = (DOCS / "security.md").read_text().partition("## Promises, and the test behind each\n")[2]
    rows = re.findall(r"^\| ([^|]+) \| (.*) \|$", section.partition("\n## ")[0], re.MULTILINE)[2:]
    assert len(rows) >= 25
    tests = [(promise, test) for promise, named in rows for test in named.split(", ")]
    assert [promise for promise, test in tests if not re.fullmatch(r"`tests/\S+::test_\w+`", test)] == []


@manual
def test_every_make_target_exists(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = document.read_text()
    code = "\n".join([*inline_code(text), *blocks(text, "bash"), *indented(prose(text))])
    assert set(re.findall(r"\bmake ([a-z][a-z-]*)", code)) <= targets


def indented(text: str) -> list[str]:
    return re.findall(r"^    (.*)$", text, re.MULTILINE)


@manual
def test_every_module_that_is_run_exists(document: Path) -> None:
    for name in re.findall(r"python -m ([\w.]+)", document.read_text()):
        assert name == "venv" or importlib.util.find_spec(name) is not None, name


def command_lines(text: str) -> Iterator[list[str]]:
    """Yield every call of the daemon in code, as words; lines that end in a backslash go on."""
    code = "\n".join([*inline_code(text), *blocks(text, "bash"), *indented(prose(text))]).replace("\\\n", " ")
    for line in code.splitlines():
        for call in re.findall(r"heterorl-node +((?:--|[a-z]).*)", re.sub(r"\s#.*", "", line)):
            yield re.split(r"[|;&]", call)[0].split()


@manual
def test_every_command_and_flag_exists(document: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in command_lines(document.read_text()):
        command = [words[0]] if not words[0].startswith("-") else []
        assert set(command) <= COMMANDS.keys(), words
        if command == ["ledger"]:
            command += words[1:2]
        with pytest.raises(SystemExit):
            main([*command, "--help"])
        known = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", capsys.readouterr().out))
        flags = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert flags <= known, words


def keys_named(text: str) -> Iterator[tuple[str, str]]:
    for code in inline_code(text):
        if found := re.fullmatch(rf"({_SECTION})\.(?!toml)(\w+)(?:\.\w+)*(?: = .*)?", code):
            yield found[1], found[2]
    yield from re.findall(rf"--set '?({_SECTION})\.(\w+)", text)


@manual
def test_every_key_named_exists(document: Path) -> None:
    unknown = [
        f"{s}.{key}" for s, key in keys_named(document.read_text()) if key not in SECTIONS[s].model_fields
    ]
    assert not unknown


@manual
def test_every_example_of_configuration_has_only_keys_that_exist(document: Path) -> None:
    for block in blocks(document.read_text(), "toml"):
        sections = tomllib.loads(block)
        for section, table in sections.items():
            check_keys(SECTIONS[section], table)


def check_keys(model: type[BaseModel], table: dict[str, Any]) -> None:
    assert table.keys() <= model.model_fields.keys()
    for key, value in table.items():
        nested = model.model_fields[key].annotation
        for inner in getattr(nested, "__args__", (nested,)):
            if isinstance(value, dict) and isinstance(inner, type) and issubclass(inner, BaseModel):
                check_keys(inner, value)


def test_the_readmes_own_task_is_a_configuration_of_the_coordinator() -> None:
    (text,) = re.findall(
        r"coordinator\.toml <<'END'\n(.*?)^END$", (ROOT / "README.md").read_text(), re.M | re.S
    )
    table = tomllib.loads(text)
    settings = CoordinatorConfig.model_validate(table["coordinator"])
    assert settings.evaluation_settings.prompts == 100


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


def test_every_objective_is_on_the_list() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (DOCS / "objectives.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(MENU)


def test_the_tree_is_that_of_the_repository() -> None:
    (tree,) = blocks((DOCS / "built.md").read_text(), "text")
    folders: list[str] = []
    for indent, name in re.findall(r"^( *)(\S+)  ", tree, re.MULTILINE):
        folders = [*folders[: len(indent) // 2], name]
        assert ROOT.joinpath(*folders).exists(), "".join(folders)
    for package in ("node", "learner", "sampler", "node/coordinator", "node/weights"):
        rooms = {path.parent for path in (ROOT / package).glob("*/__init__.py")}
        assert [room.name for room in rooms if f"  {room.name}/ " not in tree] == []


def test_the_page_and_the_help_have_every_exit_code_as_the_code_says_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    meanings = {str(int(code)): code.meaning for code in ExitCode}
    (table,) = (rows for _, rows in tables(DOCS / "operating.md") if rows[0] == ["exit code", "meaning"])
    assert dict(table[1:]) == meanings
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out.partition("exit codes:\n")[2].partition("\n\n")[0]
    shown = re.split(r"^  (\d+)  ", text, flags=re.MULTILINE)[1:]
    told = {code: " ".join(meaning.split()) for code, meaning in zip(shown[::2], shown[1::2], strict=True)}
    assert told == meanings


def rendered(document: Path) -> list[Token]:
    """Parse a document as GitHub does: a blank line ends a table."""
    return MarkdownIt("commonmark").enable("table").parse(document.read_text())


def cells(row: str) -> list[str]:
    """Return the cells of a table's row in the source."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip().removeprefix("|").removesuffix("|"))]


def tables(document: Path) -> Iterator[tuple[int, list[list[str]]]]:
    """Yield the first line of each rendered table, and its rows, the headings first."""
    lines = document.read_text().splitlines()
    for token in rendered(document):
        if token.type == "table_open" and token.map is not None:
            first, end = token.map
            yield first, [cells(line) for line in (lines[first], *lines[first + 2 : end])]


@documents
def test_no_row_of_a_table_is_outside_it_and_no_cell_is_lost(document: Path) -> None:
    lines = document.read_text().splitlines()
    for before, token in itertools.pairwise(rendered(document)):
        if before.type == "paragraph_open":
            assert not re.search(r"^\|.*\|$", token.content, re.MULTILINE)
    for first, rows in tables(document):
        assert {len(row) for row in rows} == {len(rows[0])}, f"the table of line {first + 1}"
        assert not lines[first - 1].strip(), f"the site wants an empty line before line {first + 1}"


@cache
def messages_of_the_code() -> str:
    """Return every string of the product, parts of one text joined, and a gap for what is filled in."""
    texts = []
    for module in modules().values():
        for node in ast.walk(module):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
                texts.append("".join(map(str, parts)))
    return "\n".join(texts)


def quoted_messages() -> Iterator[tuple[str, str]]:
    for page in sorted((DOCS / "failures").glob("*.md")):
        text = page.read_text()
        lines = "\n".join(blocks(text, "text")).splitlines()
        for quote in [*lines, *re.findall(r'"([^"\n]+)"', prose(text))]:
            yield page.stem, quote


@pytest.mark.parametrize(("page", "quote"), list(dict.fromkeys(quoted_messages())))
def test_a_message_that_is_quoted_is_in_the_code(page: str, quote: str) -> None:
    parts = [part.strip() for part in quote.split("…")]
    code = messages_of_the_code()
    assert not [part for part in parts if len(part) >= LEAST_QUOTED and part not in code]


def test_the_index_of_failures_lists_every_page() -> None:
    pages = {path.name for path in (DOCS / "failures").glob("*.md")} - {"index.md"}
    listed = set(re.findall(r"\(([\w-]+\.md)\)", (DOCS / "failures/index.md").read_text()))
    assert listed == pages


def test_the_site_has_every_page_in_its_menu() -> None:
    def pages(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for value in entry.values() if isinstance(entry, dict) else entry:
                yield from pages(value)

    menu = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert sorted(pages(menu)) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def test_the_site_lists_every_key_that_the_configuration_command_explains(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (DOCS / "configuration.md").read_text().count("\n::configuration\n") == 1
    page = "\n".join(configuration())
    listed = {
        f"{section}.{key}"
        for section, keys in re.findall(r"^## \[([\w.]+)\]$(.*?)(?=^## |\Z)", page, re.M | re.S)
        for key in re.findall(r"^- \*\*`(\w+)`", keys, re.M)
    }
    main(["config", *(f"--role={role}" for role in ROLES), "--json"])
    explained = json.loads(capsys.readouterr().out)
    inner = {name: key for row in explained.values() for name, key in row.get("keys", {}).items()}
    assert listed == explained.keys() | inner.keys()
    assert {"coordinator.evaluation.prompts", "sampler.judge.models"} <= inner.keys()
    for row in (*explained.values(), *inner.values()):
        assert row["meaning"] in page
        assert row["bounds"] in page


def test_every_model_that_the_site_is_made_from_has_keys_with_a_meaning() -> None:
    models = re.findall(r"^::keys (\S+)$", (DOCS / "configuration.md").read_text(), re.MULTILINE)
    assert len(models) > 3
    for path in models:
        rows = tuple(rows_of("", pkgutil.resolve_name(path), {}, None))
        assert rows
        assert [row.name for row in rows if not row.meaning] == []


def test_every_module_that_the_site_explains_exists() -> None:
    for path in re.findall(r"^::: ([\w.]+)$", (DOCS / "api.md").read_text(), re.MULTILINE):
        module, _, name = path.rpartition(".") if re.search(r"\.[A-Z]", path) else (path, "", "")
        text = (ROOT / f"{module.replace('.', '/')}.py").read_text()
        assert re.search(rf"^class {name}\b", text, re.MULTILINE) or not name, path


def test_the_figures_of_the_readme_are_those_of_the_results() -> None:
    promises = (ROOT / "README.md").read_text().partition("## What it promises")[2].partition("\n## ")[0]
    results = (DOCS / "results.md").read_text()
    figures = re.findall(r"1/\d+|\d+\.\d+(?: %)?|\d+ to \d+ %", promises)
    assert len(figures) >= 5
    assert [figure for figure in figures if figure not in results] == []


def test_the_table_of_sizes_is_what_the_benchmark_wrote() -> None:
    written = (ROOT / "bench/results/weights.md").read_text()
    rows = re.findall(r"^\| (\d\.\d\d) % \| 1/(\d+) \| 1/(\d+) \|", (DOCS / "results.md").read_text(), re.M)
    assert len(rows) == 3
    for changed, ours, pulse in rows:
        (section,) = (part for part in written.split("\n**") if f"{changed} % changed" in part)
        ratios = dict(re.findall(r"^\| ([^|]+) \| [\d,]+ \| (\d+) \|", section, re.M))
        assert (ratios["ours (C, AVX-512)"], ratios["pulse"]) == (ours, pulse)


def test_every_document_of_a_release_has_its_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    newest = re.search(r"^## (\S+?),? ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == version
    images = (ROOT / "deploy/k8s/overlays/example/kustomization.yaml").read_text()
    assert set(re.findall(r"newTag: (\S+)}", images)) == {version}


@manual
def test_a_document_has_one_title_and_no_line_is_endless(document: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1
    assert not [line for line in text.splitlines() if len(line) > 160 and not line.startswith("|")]


def test_workflows_and_hooks_are_yaml_and_call_what_there_is() -> None:
    for path in [ROOT / ".pre-commit-config.yaml", *(ROOT / ".github/workflows").glob("*.yml")]:
        assert yaml.safe_load(path.read_text()), path
    assert "run: .ci/run" in (ROOT / ".github/workflows/ci.yml").read_text()
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    entries = [hook["entry"] for hook in itertools.chain.from_iterable(repo["hooks"] for repo in hooks)]
    assert all(entry.startswith(".venv/bin/") for entry in entries)
