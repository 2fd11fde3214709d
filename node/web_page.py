"""A page of the telemetry port: text and pictures, without a line of script.

What it shows comes from strangers' machines too. The page forbids the browser to load or run anything;
whoever writes a body escapes every text (``text``).
"""

from collections.abc import Iterable
from html import escape

from node.visible_text import visible

_HEAD = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
{refresh}<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; }}
:root {{ color-scheme: light dark; }}
{style}</style></head><body>
"""


def web_page(title: str, body: str, *, style: str = "", refresh_s: int | None = None) -> bytes:
    """Return a page; ``refresh_s``: the browser asks again so often; None: never."""
    refresh = "" if refresh_s is None else f'<meta http-equiv="refresh" content="{refresh_s}">\n'
    head = _HEAD.format(title=text(title), style=style, refresh=refresh)
    return f"{head}{body}</body></html>\n".encode()


def text(of: object) -> str:
    """Return a text for a body: every character visible, none of them markup."""
    return escape(visible(str(of)))


def table(names: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table for a body, of texts; empty if there are no rows."""

    def line(cells: Iterable[object], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{text(cell)}</{tag}>" for cell in cells) + "</tr>\n"

    lines = "".join(line(row, "td") for row in rows)
    return f"<table>\n{line(names, 'th')}{lines}</table>\n" if lines else ""
