"""The page ``/samples`` of the learner's telemetry port: the newest completions."""

from collections.abc import Iterable
from time import gmtime, strftime
from typing import Final

from learner.records.samples_file import CompletionSample, GroupSample
from node.visible_text import visible
from node.web_page import text, web_page

GROUPS: Final = 20
"""Shown, newest first."""

_STYLE: Final = """\
h2 { font-size: 1em; border-top: 1px solid #8888; padding-top: 1em; margin: 2em 0 .5em; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; padding: .5em; }
pre { border-left: 3px solid #8888; }
pre.prompt { border: 0; background: #8882; }
pre.above { border-color: #2a2; }
pre.below { border-color: #c33; }
p { margin: .8em 0 .2em; font-variant-numeric: tabular-nums; }
"""


def render_page(groups: Iterable[GroupSample]) -> bytes:
    """Return the page of some groups, in the order given."""
    body = "".join(map(_group, groups)) or "<p>No samples yet: see learner.samples_every_versions.</p>\n"
    return web_page("samples", f"<h1>Samples</h1>\n{body}", style=_STYLE)


def group_heading(group: GroupSample) -> str:
    """Return one line on a group; plain text, which is not escaped."""
    shown = len(group.completions)
    of = f"{shown} of {group.group_size}" if shown < group.group_size else str(shown)
    moment = strftime("%Y-%m-%d %H:%M:%SZ", gmtime(group.at_s))
    names = (group.group_id, group.sampler_id, group.task)
    group_id, sampler_id, task = (visible(name).replace("\n", " ") for name in names)
    return (
        f"version {group.version}, {moment}: group {group_id}, {of} completions by {sampler_id}, "
        f"{group.staleness_versions} versions stale; {task}, prompt {group.prompt_index}, "
        f"{group.prompt_tokens} tokens"
    )


def completion_heading(completion: CompletionSample) -> str:
    """Return one line on a completion, likewise."""
    oldest, newest = completion.oldest_version, completion.newest_version
    versions = f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}"
    return (
        f"reward {completion.reward:.4g}, advantage {completion.advantage:+.2f}, {completion.tokens} tokens, "
        f"ended by {completion.finish}, sampled from {versions}"
        + "".join(f", {name} {value:.4g}" for name, value in completion.metrics.items())
    )


def _group(group: GroupSample) -> str:
    return (
        f'<h2>{text(group_heading(group))}</h2>\n<pre class="prompt">{_text(group.prompt)}</pre>\n'
        + "".join(map(_completion, group.completions))
    )


def _completion(completion: CompletionSample) -> str:
    side = "above" if completion.advantage > 0 else "below" if completion.advantage < 0 else "level"
    heading = text(completion_heading(completion))
    return f'<p>{heading}</p>\n<pre class="{side}">{_text(completion.text)}</pre>\n'


def _text(of: str) -> str:
    return "\n" + text(of)  # a browser drops the line feed after <pre>, and no other
