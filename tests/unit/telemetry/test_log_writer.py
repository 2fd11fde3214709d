import fcntl
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from node.telemetry import log_writer
from node.telemetry.log_writer import LogWriter

PIPE_BYTES: Final = 4096
LINE: Final = "x" * 99 + "\n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    yield reading, writing
    for end in (reading, writing):
        os.close(end)


def read_until(reading: int, last: str) -> list[str]:
    text = ""
    while not text.endswith(last):
        text += os.read(reading, 1 << 16).decode()
    return text.splitlines()


def test_lines_that_nobody_reads_are_dropped_counted_and_told_of_in_their_place(
    pipe: tuple[int, int],
) -> None:
    reading, writing = pipe
    log = LogWriter(writing, queue_bytes=10_000)
    log.say_lost = "{} lost\n".format
    for _ in range(1000):
        log.write(LINE)
    dropped = log.dropped
    assert dropped >= 1000 - (PIPE_BYTES + 10_000) // len(LINE) - 1
    lines = read_until(reading, "lost\n")
    assert lines[-1] == f"{dropped} lost"
    assert len(lines) - 1 + dropped == 1000
    log.write("after\n")
    assert read_until(reading, "after\n") == ["after"]


def test_while_lines_are_dropped_a_gap_is_one_and_not_one_for_each_line_that_goes_out(
    pipe: tuple[int, int],
) -> None:
    reading, writing = pipe
    log = LogWriter(writing, queue_bytes=4_000)
    log.say_lost = "{} lost\n".format
    written = text = ""
    for _ in range(30):
        for _ in range(10):
            written += LINE
            log.write(LINE)
        text += os.read(reading, 5 * len(LINE)).decode()
    while len(found := text.splitlines()) - len(gaps := lost(found)) + sum(gaps) < written.count("\n"):
        text += os.read(reading, PIPE_BYTES).decode()
    assert sum(gaps) > 50
    # How often the queue is full and empty again is the scheduler's; a gap for each line would be one of 1.
    assert len(gaps) <= sum(gaps) / 10


def lost(lines: list[str]) -> list[int]:
    return [int(line.split()[0]) for line in lines if line.endswith("lost")]


def test_closing_waits_for_what_goes_out_and_not_for_a_reader_that_does_not_read(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = pipe
    log = LogWriter(writing)
    log.write("last words\n")
    log.close()
    assert os.read(reading, 100) == b"last words\n"
    monkeypatch.setattr(log_writer, "CLOSE_S", 0.05)
    stalled = LogWriter(writing)
    for _ in range(200):
        stalled.write(LINE)
    closing = threading.Thread(target=stalled.close)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()
    read_until(reading, LINE)


@pytest.mark.parametrize("kind", ["nobody reads", "a full disk"])
def test_a_line_that_cannot_be_written_is_counted_and_stops_nothing(kind: str) -> None:
    if kind == "nobody reads":
        reading, writing = os.pipe()
        os.close(reading)
    else:
        writing = os.open("/dev/full", os.O_WRONLY)
    log = LogWriter(writing)
    for _ in range(3):
        log.write("lost\n")
    log.close()
    assert log.dropped == 3
    os.close(writing)


def test_a_pipe_that_others_made_non_blocking_gets_every_line(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    os.set_blocking(writing, False)
    log = LogWriter(writing)
    for _ in range(200):
        log.write(LINE)
    log.write("end\n")
    assert len(read_until(reading, "end\n")) == 201
    assert log.dropped == 0


def test_what_the_terminal_cannot_show_is_written_as_its_escape(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    log = LogWriter(writing, encoding="latin-1")
    log.write("caf\u00e9 \u20ac\n")
    log.close()
    assert os.read(reading, 100) == b"caf\xe9 \\u20ac\n"


_TALKS: Final = """
import logging, os, sys
from node.commands.cli import fill_standard_descriptors
from node.telemetry.logging import configure_process_logging
fill_standard_descriptors()
configure_process_logging(log_format="auto", level="info", roles=["sampler"])
for number in range(1_500):
    logging.getLogger("node.test").info("event %s" % number, extra={"text": "x" * 1000})
    print("printed", "x" * 1000)
    print("printed", "x" * 1000, file=sys.stderr)
open(sys.argv[1], "w").write("done")
"""


@pytest.mark.parametrize("ending", ["raise SystemExit(3)", "os.abort()"])
def test_a_process_whose_output_nobody_reads_goes_on_and_ends(
    pipe: tuple[int, int], tmp_path: Path, ending: str
) -> None:
    _, writing = pipe
    done = tmp_path / "done"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{_TALKS}\n{ending}\n", str(done)], stdout=writing, stderr=writing
    )
    try:
        assert process.wait(60) in (3, -6)
        assert done.read_text() == "done"
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("closed", ["2>&-", "0<&- 1>&- 2>&-"])
def test_a_process_without_standard_error_starts_and_its_files_do_not_become_it(
    tmp_path: Path, closed: str
) -> None:
    code = (
        f"{_TALKS.replace('1_500', '3')}\n"
        "ledger = open(sys.argv[1] + '.ledger', 'w')\n"
        "os.system('echo a library writes >&2')\n"
        "assert ledger.fileno() > 2\n"
    )
    done = tmp_path / "done"
    command = ["bash", "-c", f'exec "$0" -c "$1" "$2" {closed}', sys.executable, code, str(done)]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0
    assert done.read_text() == "done"
    assert Path(f"{done}.ledger").read_text() == ""


def test_what_python_code_prints_is_an_event_and_forges_none() -> None:
    forged = json.dumps({"event": "step", "level": "info"})
    code = _TALKS.replace("1_500", "0").replace(
        "open(", f"print('\\x1b[2J'); print({forged!r}, file=sys.stderr)\nopen("
    )
    said = subprocess.run(
        [sys.executable, "-c", code, os.devnull], capture_output=True, text=True, timeout=60, check=True
    )
    assert said.stdout == ""
    events = [json.loads(line) for line in said.stderr.splitlines()]
    assert [(each["event"], each["program"], each["text"]) for each in events] == [
        ("printed", "standard output", "\\x1b[2J"),
        ("printed", "standard error", forged),
    ]
    assert re.search("\x1b", said.stderr) is None
