"""MkDocs hook: brings files that documents link to, from anywhere in the repository, into the site.

A link is written as GitHub reads it, relative to its file. ``docs/x.md`` becomes page ``x``; a file elsewhere
that a page links to, directly or through another, becomes ``source/<its path>``. A link to a folder goes to
its README, or is plain text where the folder has none. A link that leads nowhere is left as it is, and MkDocs
reports it.

A line ``::keys FILE CLASS`` becomes the keys of that section, with default, bounds and docstring; a line
``::graders`` those that the built-in graders declare.
"""

import ast
import importlib
import posixpath
import re
import typing
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

PACKAGES: Final = ("node", "learner", "sampler")
ROOT: Final = Path(__file__).parents[1]
DOCS: Final = "docs/"
ELSEWHERE: Final = "source/"

_LINK: Final = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
_KEYS: Final = re.compile(r"^::keys (?P<file>\S+) (?P<model>\w+)$", re.MULTILINE)
_GRADERS: Final = re.compile(r"^::graders$", re.MULTILINE)
_BOUNDS: Final = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
_CODE: Final = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Add every file that a page links to and that is not below docs/."""
    from mkdocs.structure.files import File  # tests read the rest of this module without MkDocs

    waiting = [DOCS + file.src_uri for file in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        document = waiting.pop()
        for target in _targets(document) - seen:
            seen.add(target)
            if not target.startswith(DOCS):
                files.append(File.generated(config, site_path(target), abs_src_path=str(ROOT / target)))
            if target.endswith(".md"):
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """Return the page with its links turned from paths of the repository to paths of the site."""
    document = repository_path(page.file.src_uri)

    def rewritten(match: re.Match[str]) -> str:
        target = resolve(document, match["target"])
        if target is None:
            return match[0]
        if (ROOT / target).is_dir():
            return match["text"]
        here = posixpath.dirname(page.file.src_uri)
        link = posixpath.relpath(site_path(target), here or ".") + (match["anchor"] or "")
        return f"[{match['text']}]({link})"

    linked = _LINK.sub(rewritten, markdown)
    linked = _GRADERS.sub(lambda match: "\n".join(graders()), linked)
    return _KEYS.sub(lambda match: "\n".join(keys_of(ROOT / match["file"], match["model"])), linked)


def keys_of(file: Path, model: str) -> Iterator[str]:
    """Yield a list of Markdown: each key of a section of the configuration, those of its bases first.

    Bases may be of other files, as those that graders declare.

    Raises:
        AttributeError: the file has no such class.
    """
    module = importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    bases = getattr(module, model).__mro__
    for base in reversed(bases):
        yield from _own_keys(base)


def graders() -> Iterator[str]:
    """Yield what each built-in grader declares: the keys of its table, and of the tables of its peers."""
    from node.grading.registry import built_in, grader_class  # tests read the rest without the daemon

    for name in built_in():
        grader = grader_class(name)
        if grader.table is not None:
            yield f"\n### {name}\n"
            yield from _own_keys(grader.table)
        fields = {} if grader.settings is None else grader.settings.model_fields
        for key, field in fields.items():
            for nested in typing.get_args(field.annotation):
                if hasattr(nested, "model_fields"):
                    yield f"\n### [sampler.{key}], [verifier.{key}]\n"
                    yield from _own_keys(nested)


def _own_keys(model: type) -> Iterator[str]:
    """Yield the keys that a class itself has, none where it is not of this project."""
    if model.__module__.partition(".")[0] not in PACKAGES:
        return
    classes = ast.parse((ROOT / f"{model.__module__.replace('.', '/')}.py").read_text()).body
    sections = (node for node in classes if isinstance(node, ast.ClassDef) and node.name == model.__name__)
    for section in sections:
        for field, described in pairwise(section.body):
            match field, described:
                case (
                    ast.AnnAssign(target=ast.Name(id=name), value=value),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ) if not ast.unparse(field).startswith(f"{name}: ClassVar"):
                    live = (
                        ", may change in a run" if ast.unparse(field.annotation).startswith("Live[") else ""
                    )
                    yield f"- **`{name}`**{_default(value)}{live}"
                    yield f"    <br>{' '.join(text.split())}"


def _default(value: ast.expr | None) -> str:
    """Return default and bounds of a field, as part of a line."""
    if value is None:
        return ""
    if not isinstance(value, ast.Call):
        return f" = `{ast.unparse(value)}`"
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in value.keywords}
    default = f" = `{given['default']}`" if "default" in given else ""
    bounds = [f"{word} `{given[key]}`" for key, word in _BOUNDS.items() if key in given]
    return f"{default}; {', '.join(bounds)}" if bounds else default


def resolve(document: str, target: str) -> str | None:
    """Return where in the repository a link in ``document`` leads: a file, or a folder without a README.

    None: nowhere, or out of the repository.
    """
    if re.match(r"[a-z]+:", target):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(document), target))
    if path.startswith("..") or not (ROOT / path).exists():
        return None
    readme = posixpath.join(path, "README.md")
    return readme if (ROOT / readme).is_file() else path


def links_of(text: str) -> Iterator[str]:
    """Yield the targets of a document's links, without anchors; code is not looked at."""
    for match in _LINK.finditer(_CODE.sub("", text)):
        yield match["target"]


def site_path(path: str) -> str:
    """Return where a file of the repository is in the site's sources."""
    return path.removeprefix(DOCS) if path.startswith(DOCS) else ELSEWHERE + path


def repository_path(src_uri: str) -> str:
    """Return the file that a source of the site is."""
    return src_uri.removeprefix(ELSEWHERE) if src_uri.startswith(ELSEWHERE) else DOCS + src_uri


def _targets(document: str) -> set[str]:
    found = (resolve(document, target) for target in links_of((ROOT / document).read_text()))
    return {target for target in found if target is not None and (ROOT / target).is_file()}
