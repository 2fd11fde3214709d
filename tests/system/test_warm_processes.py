"""Processes that tests fork from a warm one end with the pytest that asked for them, however that ends."""

import os
import subprocess
import sys

import psutil
import pytest

WORKER = """
import os, sys
from support.warm_python import WarmProcess
nowhere = os.open(os.devnull, os.O_RDWR)
descriptors = dict.fromkeys(range(3), nowhere)
waiting = ["http.server", "--bind", "127.0.0.1", "0"]
print(WarmProcess(waiting, env=os.environ, descriptors=descriptors).pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.usefixtures("warm_server")
def test_a_process_ends_with_a_worker_that_is_killed() -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", WORKER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ) as worker:
        assert worker.stdout is not None
        process = psutil.Process(int(worker.stdout.readline()))
        worker.kill()
    process.wait(10)
