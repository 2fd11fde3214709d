import asyncio
import io
import json
import logging
import math
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal

import pytest

from node.config.setting_sources import read_flags
from node.config.settings import load
from node.process.bootstrap import shown_settings
from node.telemetry import logging as process_log
from node.telemetry.logging import OUR_PACKAGES, WARNINGS_PER_INTERVAL, bind_peer, configure_logging, to_json

_log = logging.getLogger("node.test")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextmanager
def logged(
    stream: io.StringIO, *, log_format: Literal["auto", "json", "human"] = "auto", level: str = "info"
) -> Iterator[io.StringIO]:
    handlers, root_level = logging.root.handlers[:], logging.root.level
    try:
        configure_logging(log_format=log_format, level=level, roles=["coordinator", "learner"], stream=stream)
        yield stream
    finally:
        logging.captureWarnings(False)
        logging.root.handlers[:] = handlers
        logging.root.setLevel(root_level)
        for package in OUR_PACKAGES:
            logging.getLogger(package).setLevel(logging.NOTSET)


def test_off_a_terminal_every_record_is_one_json_object_with_its_fields() -> None:
    with logged(io.StringIO()) as stream:
        _log.info("step finished", extra={"version": 12, "nested": {"a": [1, b"\x01"]}, "lost": math.nan})
    line = json.loads(stream.getvalue())
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info",
        "event": "step finished",
        "role": "coordinator+learner",
        "node": "",
        "logger": "node.test",
        "version": 12,
        "nested": {"a": [1, "01"]},
        "lost": "nan",
    }


def test_a_field_never_replaces_what_every_record_has() -> None:
    with logged(io.StringIO()) as stream:
        _log.info("joined", extra={"role": "sampler", "level": "low"})
    line = json.loads(stream.getvalue())
    assert (line["role"], line["role_"]) == ("coordinator+learner", "sampler")
    assert (line["level"], line["level_"]) == ("info", "low")


def test_an_exception_stays_on_the_line() -> None:
    with logged(io.StringIO()) as stream:
        try:
            raise ValueError("broken")
        except ValueError:
            _log.exception("failed")
    assert "ValueError: broken" in json.loads(stream.getvalue())["exception"]


def test_on_a_terminal_a_record_is_a_line_to_read() -> None:
    with logged(Terminal()) as stream:
        _log.info(
            "step finished", extra={"version": 12, "loss": 0.12345649, "why": "two words", "by": {"a": 1}}
        )
    text = stream.getvalue()
    assert text[12:] == (
        " INFO    step finished"
        '  version=12 loss=0.123456 why="two words" by={"a": 1}'
        "  (coordinator+learner node.test)\n"
    )


def test_the_first_line_has_all_settings_off_a_terminal_and_on_one_those_that_differ() -> None:
    flags = read_flags(
        {}, ["node.state_dir=/s", "node.tls=true", "relay.retained_keyframes=9", "node.coordinator=h:1"]
    )
    settings = shown_settings(load(roles=["relay"], files=[], environ={}, flags=flags))
    lines = {}
    for stream in (Terminal(), io.StringIO()):
        with logged(stream):
            _log.info("configuration", extra={"values": settings})
        lines[type(stream)] = stream.getvalue()
    shown = 'values=node.state_dir="/s" node.coordinator="h:1" relay.retained_keyframes=9 (all others have '
    assert shown in lines[Terminal]
    assert "tls" not in lines[Terminal]
    whole = json.loads(lines[io.StringIO])["values"]
    assert whole["node.tls"] == "True (flag --set)"
    assert whole["telemetry.log_level"] == "info (default)"
    assert len(whole) > 10


def test_of_a_table_a_terminal_has_the_keys_that_were_given() -> None:
    evaluation = ["coordinator.evaluation.every_versions=7", "coordinator.evaluation.prompts=9"]
    flags = read_flags({}, ["node.state_dir=/s", "coordinator.task=x", *evaluation])
    settings = shown_settings(load(roles=["coordinator"], files=[], environ={}, flags=flags))
    assert 'coordinator.evaluation={"every_versions": 7, "prompts": 9} ' in settings.shown
    assert "'completions': 1" in str(settings["coordinator.evaluation"])


def test_a_field_from_a_peer_cannot_forge_a_line() -> None:
    with logged(Terminal()) as stream:
        _log.info("refused", extra={"detail": "x\n12:00:00.000 ERROR   forged", "empty": ""})
    assert stream.getvalue().count("\n") == 1
    assert 'empty=""' in stream.getvalue()


def test_the_format_can_be_forced() -> None:
    with logged(Terminal(), log_format="json") as stream:
        _log.info("x")
    json.loads(stream.getvalue())
    with logged(io.StringIO(), log_format="human") as stream:
        _log.info("x")
    assert stream.getvalue().endswith("(coordinator+learner node.test)\n")


def test_others_are_heard_only_with_a_warning_and_we_at_our_level() -> None:
    with logged(io.StringIO(), level="debug") as stream:
        logging.getLogger("elsewhere").info("noise")
        logging.getLogger("elsewhere").warning("heard")
        _log.debug("ours")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["heard", "ours"]


def test_a_python_warning_becomes_a_record() -> None:
    with logged(io.StringIO()) as stream, warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", stacklevel=1)
    assert json.loads(stream.getvalue())["logger"] == "py.warnings"


async def test_a_record_names_the_peer_of_its_task_and_threads() -> None:
    async def peer(role: str) -> None:
        bind_peer(role=role, node_id=f"{role}-1")
        await asyncio.to_thread(_log.info, role)

    with logged(io.StringIO()) as stream:
        await asyncio.gather(peer("learner"), peer("sampler"))
        _log.info("process")
    lines = {line["event"]: line for line in map(json.loads, stream.getvalue().splitlines())}
    assert {event: (line["role"], line["node"]) for event, line in lines.items()} == {
        "learner": ("learner", "learner-1"),
        "sampler": ("sampler", "sampler-1"),
        "process": ("coordinator+learner", ""),
    }


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_json_is_strict_where_floats_are_not(value: float) -> None:
    assert json.loads(to_json({"x": [value]})) == {"x": [str(value)]}


def test_a_warning_that_repeats_is_logged_some_times_and_then_counted() -> None:
    with logged(io.StringIO()) as stream:
        for _ in range(WARNINGS_PER_INTERVAL + 7):
            _log.warning("group refused", extra={"reason": "over_limit"})
        _log.info("step")
        logging.root.handlers[0].close()
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [event["event"] for event in events] == [
        *["group refused"] * WARNINGS_PER_INTERVAL,
        "step",
        "repeated, not logged",
    ]
    told = events[-1]
    assert (told["repeated"], told["times"], told["level"]) == ("group refused", 7, "warning")


def test_the_story_is_told_whole_and_debug_without_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_log, "STORY_PER_INTERVAL", 100)
    with logged(io.StringIO(), level="debug") as stream:
        for _ in range(100):
            _log.info("step")
        for _ in range(150):
            _log.debug("group")
    assert stream.getvalue().count("\n") == 250


@pytest.mark.parametrize("later_s", [60.0, -1000.0])
def test_another_message_tells_what_an_ended_interval_kept_back(later_s: float) -> None:
    def record(message: str, created: float) -> logging.LogRecord:
        made = logging.makeLogRecord({"name": "node.test", "levelno": logging.WARNING, "msg": message})
        made.created = created
        return made

    with logged(io.StringIO()) as stream:
        [handler] = logging.root.handlers
        for _ in range(WARNINGS_PER_INTERVAL + 4):
            handler.handle(record("refused", 1000.0))
        handler.handle(record("joined", 1000.0 + 59.0))
        assert "repeated" not in stream.getvalue()
        handler.handle(record("joined", 1059.0 + later_s))
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [event["event"] for event in events[-3:]] == ["joined", "repeated, not logged", "joined"]
    assert (events[-2]["repeated"], events[-2]["times"]) == ("refused", 4)


def test_the_messages_that_are_counted_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_log, "REPEATING_MESSAGES", 2)
    with logged(io.StringIO()) as stream:
        for number in (*[0] * (WARNINGS_PER_INTERVAL + 1), 1, 2, 3):
            _log.warning("message %d" % number)  # noqa: UP031 - each a message of its own
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [event["event"] for event in events[-2:]] == ["repeated, not logged", "message 3"]


_DYING: Final = """
import os, signal, sys, threading
from node.telemetry.logging import configure_process_logging
configure_process_logging(log_format="auto", level="info", roles=["sampler"])
{}
"""


def last_words(code: str) -> tuple[int, str]:
    """Run a process that ends by ``code``; return its exit code and what it wrote to standard error."""
    done = subprocess.run(
        [sys.executable, "-c", _DYING.format(code)], capture_output=True, text=True, timeout=30, check=False
    )
    return done.returncode, done.stderr


def test_an_exception_nobody_caught_is_one_event_with_its_traceback() -> None:
    code, written = last_words("raise ValueError('broken')")
    event = json.loads(written)
    assert code == 1
    assert (event["event"], event["level"]) == ("uncaught exception", "critical")
    assert "ValueError: broken" in event["exception"]


def test_an_exception_in_a_thread_is_one_event() -> None:
    _, written = last_words(
        "thread = threading.Thread(target=lambda: 1 / 0, name='codec'); thread.start(); thread.join()"
    )
    event = json.loads(written)
    assert (event["event"], event["thread_name"]) == ("uncaught exception in a thread", "codec")
    assert "ZeroDivisionError" in event["exception"]


def test_a_crash_in_native_code_leaves_a_trace_of_python() -> None:
    code, written = last_words("os.abort()")
    assert code == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in written
