"""Which lines of the code that decides were run by simulated runs, and which never were."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

WATCHED = (
    "node/coordinator/work",
    "node/coordinator/fleet",
    "node/coordinator/requests/door.py",
    "node/coordinator/transactions/run_ledger.py",
    "node/coordinator/transactions/request_queue.py",
    "node/coordinator/peers/peers.py",
    "node/coordinator/streams/learner_stream.py",
    "node/coordinator/operators/order_desk.py",
    "node/coordinator/streams/reward_checking.py",
    "node/coordinator/ledger/ledger_file.py",
    "node/clients/rollouts/outstanding_rollouts.py",
    "learner/intake/batch_buffer.py",
    "learner/intake/trained_slots.py",
    "learner/merging/deals.py",
    "learner/merging/rounds.py",
    "learner/merging/contributor_streams.py",
    "learner/training/merge_taker.py",
    "learner/contributor/contributor_state.py",
    "learner/contributor/contributor.py",
    "node/clients/contributions/contribute_stream.py",
    "node/serving/merge_servicer.py",
    "sampler/served_policy.py",
    "sampler/rollouts/leasing.py",
    "sampler/rollouts/work_queue.py",
    "sampler/rollouts/group_submitter.py",
)


class Branches:
    """The lines reached, by file."""

    def __init__(self) -> None:
        self._files = {str(path): path for path in _files()}
        self.reached: dict[str, set[int]] = {name: set() for name in self._files}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note the lines that the body runs; slows it down several times."""
        before = sys.gettrace()
        sys.settrace(self._on_call)
        try:
            yield
        finally:
            sys.settrace(before)

    def rows(self) -> Iterator[tuple[str, int, list[tuple[int, str]]]]:
        """Yield each file, its lines within functions, and those never run with their text."""
        for name, path in self._files.items():
            text = path.read_text()
            lines = {n for code in _functions(compile(text, name, "exec")) for n in _lines_of(code)}
            source = text.splitlines()
            missing = sorted(lines - self.reached[name])
            yield str(path.relative_to(ROOT)), len(lines), [(n, source[n - 1].strip()) for n in missing]

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        reached = self.reached.get(frame.f_code.co_filename)
        if reached is None:
            return None

        def on_line(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "line":
                reached.add(frame.f_lineno)
            return on_line

        return on_line


def _files() -> Iterator[Path]:
    for watched in WATCHED:
        path = ROOT / watched
        files = [path] if path.suffix else sorted(path.rglob("*.py"))
        yield from (file for file in files if file.name != "__init__.py")


def _functions(code: CodeType) -> Iterator[CodeType]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            is_class = "__qualname__" in inner.co_names
            if not is_class:
                yield inner
            yield from _functions(inner)


def _lines_of(code: CodeType) -> Iterator[int]:
    lines = (line for *_, line in code.co_lines())
    return (line for line in lines if line is not None and line > code.co_firstlineno)
