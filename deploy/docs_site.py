"""MkDocs hook: brings files that documents link to, from anywhere in the repository, into the site.

A link is written as GitHub reads it, relative to its file. ``docs/x.md`` becomes page ``x``; a file elsewhere
that a page links to, directly or through another, becomes ``source/<its path>``. A link to a folder goes to
its README, or is plain text where the folder has none. A link that leads nowhere is left as it is, and MkDocs
reports it.

A line ``::configuration`` becomes every section with its keys, as ``heterorl-node config`` explains them, a
line ``::keys MODULE:CLASS`` the keys of one model, and a line ``::graders`` those that the built-in graders
declare.
"""

import pkgutil
import posixpath
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from node.config.setting_table import SettingRow, rows_of
from node.config.settings import SECTIONS
from node.grading.registry import built_in, grader_class
from node.telemetry.logging import to_json

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).parents[1]
DOCS: Final = "docs/"
ELSEWHERE: Final = "source/"

_LINK: Final = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
_KEYS: Final = re.compile(r"^::keys (?P<model>\S+)$", re.MULTILINE)
_CONFIGURATION: Final = "::configuration\n"
_GRADERS: Final = "::graders\n"
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
    listed = _KEYS.sub(lambda match: "\n".join(keys_of(_options(match["model"]))), linked)
    listed = listed.replace(_GRADERS, "\n".join(graders()))
    return listed.replace(_CONFIGURATION, "\n".join(configuration()))


def graders() -> Iterator[str]:
    """Yield the keys of the table that each built-in grader has among the options of a task."""
    for name in built_in():
        if (table := grader_class(name).table) is not None:
            yield from (f"### {name}", "", *keys_of(rows_of("", table, {}, None)), "")


def _options(path: str) -> Iterator[SettingRow]:
    return rows_of("", pkgutil.resolve_name(path), {}, None)


def configuration() -> Iterator[str]:
    """Yield the lines of every section that a configuration may have, tables of known keys too."""
    for section, path in SECTIONS.items():
        rows = tuple(rows_of(section, pkgutil.resolve_name(path), {}, None))
        yield from (f"## [{section}]", "", *keys_of(rows), "")
        for row in rows:
            if row.keys:
                yield from (f"## [{row.name}]", "", *keys_of(row.keys), "")


def keys_of(rows: Iterable[SettingRow]) -> Iterator[str]:
    """Yield a list of Markdown: each key with default, bounds and meaning."""
    for row in rows:
        default = "" if row.default is None else f" = `{to_json(row.default)}`"
        about = "".join(f"; {word}" for word in ("required" * row.is_required, row.bounds) if word)
        yield f"- **`{row.name.rpartition('.')[2]}`**{default}{about}"
        yield f"    <br>{row.meaning}"


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
