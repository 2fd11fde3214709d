"""Tables of reports, in Markdown."""

from collections.abc import Iterable, Sequence


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Return a table whose columns but the first are aligned to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
