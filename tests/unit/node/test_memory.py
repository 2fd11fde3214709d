"""Memory that was freed is used again, also by other threads; cycles are looked for seldom."""

import subprocess
import sys

_FAULTS_OF_MESSAGES = """
import resource
from node.process.memory import keep_freed_memory
if {tuned}:
    assert keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
before = faults()
for _ in range(10):
    under_way = [bytearray(1 << 20) for _ in range(20)]
    del under_way
print(faults() - before)
"""


def _faults(*, tuned: bool) -> int:
    code = _FAULTS_OF_MESSAGES.format(tuned=tuned)
    return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout)


def test_a_message_after_the_first_costs_no_new_pages() -> None:
    assert _faults(tuned=False) > 25_000
    assert _faults(tuned=True) < 10_000


_MEMORY_OF_THREADS = """
import threading
from pathlib import Path
from node.process.memory import keep_freed_memory
assert keep_freed_memory(has_one_heap={has_one_heap})
turn, everybody = threading.Semaphore(), threading.Barrier(8)
def receive():
    everybody.wait()  # all threads live at once, as gRPC's do
    with turn:
        under_way = [bytearray(1 << 20) for _ in range(20)]
        del under_way
    everybody.wait()
threads = [threading.Thread(target=receive) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
"""


def test_threads_that_receive_in_turn_need_the_memory_of_one() -> None:
    resident_bytes = [
        int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout)
        for has_one_heap in (False, True)
        for code in [_MEMORY_OF_THREADS.format(has_one_heap=has_one_heap)]
    ]
    assert resident_bytes[0] - resident_bytes[1] > 100 << 20


_LOOKS_AT_ALL = """
import gc
from node.process.memory import collect_seldom
if {seldom}:
    collect_seldom()
before = gc.get_stats()[2]["collections"]
for _ in range(30):  # reports of 2000 peers, which replace those before
    reports = {{peer: [[] for _ in range(5)] for peer in range(2000)}}
print(gc.get_stats()[2]["collections"] - before)
"""


def test_reports_that_replace_others_start_no_look_at_all_objects() -> None:
    looks = [
        int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout)
        for seldom in (False, True)
        for code in [_LOOKS_AT_ALL.format(seldom=seldom)]
    ]
    assert looks[0] > 0 == looks[1]
