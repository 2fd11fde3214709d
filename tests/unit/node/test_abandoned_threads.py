import subprocess
import sys

import pytest

ENDING = """
import threading
from concurrent.futures import ThreadPoolExecutor
from node.process.abandoned_threads import abandon, exit_without_them

executor = ThreadPoolExecutor(1)
executor.submit({call})
executor.shutdown(wait=False)
{abandons}
print("orderly", end="")
exit_without_them(1)
"""


@pytest.mark.parametrize(
    ("call", "abandons", "exit_code"),
    [("threading.Event().wait", 'abandon("engine")', 1), ("print", "", 0)],
    ids=["abandoned", "none"],
)
def test_a_process_ends_with_its_exit_code_whatever_abandoned_threads_do(
    call: str, abandons: str, exit_code: int
) -> None:
    script = ENDING.format(call=call, abandons=abandons)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, check=False)
    assert ended.returncode == exit_code
    assert ended.stdout.strip().endswith(b"orderly")
