"""Memory that was freed is used again."""

import subprocess
import sys

_FAULTS_OF_MESSAGES = """
import resource
from node.process.allocator import keep_freed_memory
if {tuned}:
    assert keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
before = faults()
for _ in range(20):
    under_way = [bytearray(1 << 20) for _ in range(20)]
    del under_way
print(faults() - before)
"""


def _faults(*, tuned: bool) -> int:
    code = _FAULTS_OF_MESSAGES.format(tuned=tuned)
    return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout)


def test_a_message_after_the_first_costs_no_new_pages() -> None:
    assert _faults(tuned=False) > 50_000
    assert _faults(tuned=True) < 15_000
