"""Sections as one HTML page: text and pictures, without a line of script.

What a page shows comes from strangers' machines too. This module and ``chart`` alone write markup: they
escape every text, and the page forbids the browser to load or run anything.
"""

from collections.abc import Iterable
from math import isfinite
from typing import Final

from node.page.chart import STYLE, chart
from node.page.section import Block, Curve, Grid, Items, Quotation, Section
from node.text.visible_text import as_html

_HEAD: Final = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
{refresh}<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; }}
h1 {{ margin: 0; }}
h2 {{ font-size: 1.1em; margin: 1.4em 0 .3em; }}
p, ul {{ margin: .3em 0; }}
figure {{ display: inline-block; vertical-align: bottom; width: 46%; min-width: 22em; margin: 0 1em .5em 0; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: left; padding: .1em 1em .1em 0; overflow-wrap: anywhere; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; margin: 0 0 .5em; padding: .5em; }}
pre {{ border-left: 3px solid #8888; }}
p.prompt {{ font-weight: bold; margin-top: 1.5em; }}
pre.prompt {{ border: 0; background: #8882; }}
pre.above {{ border-color: #2a2; }}
pre.below {{ border-color: #c33; }}
{style}</style></head><body>
<h1>{title}</h1>
<p><small>{note}</small></p>
"""


def rendered(title: str, note: str, sections: Iterable[Section], *, refresh_s: int | None = None) -> bytes:
    """Return the page.

    Args:
        note: of when it is, under the title.
        refresh_s: the browser asks again so often; None: never.
    """
    refresh = "" if refresh_s is None else f'<meta http-equiv="refresh" content="{refresh_s}">\n'
    head = _HEAD.format(title=as_html(title), note=as_html(note), style=STYLE, refresh=refresh)
    return f"{head}{''.join(map(_section, sections))}</body></html>\n".encode()


def _section(section: Section) -> str:
    title, body = as_html(section.title), "".join(map(_block, section.blocks))
    if section.is_folded:
        return f"<h2>{title}</h2>\n<details><summary>show</summary>\n{body}</details>\n"
    return f"<h2>{title}</h2>\n{body}"


def _block(block: Block) -> str:
    match block:
        case str():
            return f"<p>{as_html(block)}</p>\n"
        case Items():
            items = "".join(f"<li>{as_html(line)}</li>\n" for line in block.lines)
            return f"<ul>\n{items}</ul>\n"
        case Grid():
            lines = "".join(_row(row, "td") for row in block.rows)
            return f"<table>\n{_row(block.names, 'th')}{lines}</table>\n"
        case Curve():
            return _figure(block)
        case Quotation():
            # A browser drops the line feed after <pre>, and no other.
            quoted = f'<pre class="{block.tone}">\n{as_html(block.text)}</pre>\n'
            return f'<p class="{block.tone}">{as_html(block.about)}</p>\n{quoted}'


def _row(cells: Iterable[object], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{as_html(cell)}</{tag}>" for cell in cells) + "</tr>\n"


def _figure(curve: Curve) -> str:
    """Return a picture with its newest value in words; empty if no value is a number."""
    lines = [[point for point in series.points if isfinite(point[1])] for series in curve.series]
    points = next(filter(None, lines), None)
    if points is None:
        return ""
    values = [value for _, value in points]
    return (
        f"<figure><figcaption>{as_html(curve.title)}: <b>{values[-1]:.4g}</b><br>"
        f"<small>at version {points[-1][0]:g}; {min(values):.4g} to {max(values):.4g}</small></figcaption>"
        f"{chart(curve)}</figure>\n"
    )
