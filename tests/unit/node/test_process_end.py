import json
import subprocess
import sys
from typing import Final

import pytest

ENDS: Final = """
import atexit, logging, sys, threading
from concurrent.futures import ThreadPoolExecutor
from node.process.process_end import PROCESS_END
PROCESS_END.register()
from node.telemetry.logging import configure_process_logging
configure_process_logging(log_format="json", level="info", roles=["learner"])
log = logging.getLogger("node.test")
atexit.register(log.info, "a library's end")
class Slow:
    def __del__(self):
        log.info("taken apart")
sys.slow = Slow()
may_end = threading.Event()
ThreadPoolExecutor().submit(lambda: (may_end.wait(10), log.info("written")))
threading.Timer(0.1, may_end.set).start()
{}
"""


@pytest.mark.parametrize(
    ("ending", "exit_code", "events"),
    [
        ("PROCESS_END.exit_code = 4; sys.exit(4)", 4, ["written", "a library's end", "stopped"]),
        ("sys.exit(2)", 2, ["written", "a library's end"]),
    ],
)
def test_stopped_is_the_last_word_after_the_threads_and_before_python_is_taken_apart(
    ending: str, exit_code: int, events: list[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS.format(ending)], capture_output=True, text=True, timeout=30, check=False
    )
    told = [json.loads(line)["event"] for line in done.stderr.splitlines()]
    assert (done.returncode, told[: len(events)]) == (exit_code, events)
    assert "taken apart" not in told or "stopped" not in told
