import logging
from typing import Any, Final

import pytest

from node.telemetry import printed_lines
from node.telemetry.printed_lines import INTERVAL_S, LINE_CHARACTERS, LINES_PER_INTERVAL, PrintedLines


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def events(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    names = ("program", "text", "is_cut", "lines")
    return [{name: vars(one)[name] for name in names if name in vars(one)} for one in caplog.records]


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "node.telemetry.printed_lines")


LONG: Final = "y" * (LINE_CHARACTERS + 1)


@pytest.mark.parametrize(
    ("chunks", "texts"),
    [
        ((b"one\ntwo\n",), ["one", "two"]),
        ((b"o", b"ne\ntw", b"o"), ["one", "two"]),
        ((b"\n\n  \n",), []),
        ((b" 10%\r 20%\r\n",), [" 10%", " 20%"]),
        ((b"\x1b[2J\x1b]0;title\x07\n",), ["\\x1b[2J\\x1b]0;title\\x07"]),
        ((b'{"event": "step"}\n',), ['{"event": "step"}']),
        ((b"caf\xc3\xa9 \xff\n",), ["caf\u00e9 \ufffd"]),
        (("right to left \u202e\n".encode(),), ["right to left \\u202e"]),
        ((LONG.encode() + b"\nnext\n",), [LONG[:-1], "next"]),
        ((*[b"z" * 5000] * 20, b"\nnext\n"), ["z" * LINE_CHARACTERS, "next"]),
    ],
)
def test_each_line_is_an_event_with_the_visible_text(
    caplog: pytest.LogCaptureFixture, chunks: tuple[bytes, ...], texts: list[str]
) -> None:
    printed = PrintedLines("grader")
    for chunk in chunks:
        printed.feed(chunk)
    printed.end()
    assert [one["text"] for one in events(caplog)] == texts
    assert all(one["program"] == "grader" for one in events(caplog))
    assert all(
        one.get("is_cut") == (True if len(one["text"]) == LINE_CHARACTERS else None) for one in events(caplog)
    )


def test_of_what_prints_too_much_the_first_lines_of_each_interval_are_logged_and_the_others_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    printed = PrintedLines("grader", now=clock)
    printed.feed(b"again\n" * 2000)
    clock.now_s += INTERVAL_S
    printed.feed(b"later\n")
    printed.end()
    told = events(caplog)
    assert len(told) == LINES_PER_INTERVAL + 2
    assert told[-2] == {"program": "grader", "lines": 2000 - LINES_PER_INTERVAL}
    assert told[-1]["text"] == "later"


def test_a_command_shows_what_programs_print_and_leaves_the_log_as_it_was(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = list(printed_lines.logger.handlers)
    with printed_lines.shown():
        PrintedLines("grader").feed(b"hello \x1b[2J\n")
    assert capsys.readouterr().err == "grader: hello \\x1b[2J\n"
    assert printed_lines.logger.handlers == before
    assert printed_lines.logger.propagate
