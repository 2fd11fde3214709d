"""A corpus of programs that want a reward without the answer: none passes a single test."""

from dataclasses import dataclass

import pytest

from node.task_options import CodeOptions
from sampler.tasks.code.code_grader import CodeGrader
from sampler.tasks.code.sandbox import Sandbox, find_sandbox

pytestmark = pytest.mark.needs("bwrap", "libseccomp")

HONEST = """
def f(x): return x * x
def rest(xs): return xs[1:]
def upper(s): return s.upper()
def seen(xs): return set(xs)
def halves(xs): yield from (x / 2 for x in xs)
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x)
    def size(self): return len(self.items)
    def has(self, x): return x in self.items
"""
"""The solution that every list of tests below is for."""

EQUALITY = (
    "assert f(2) == 4",
    "assert not f(2) != 4",
    "assert 4 == f(2)",
    "assert f(2) in (4, 16)",
    "assert abs(f(3) - 9) < 1e-6",
    "assert math.isclose(f(2), 4)",
    "assert 8 < f(3) < 10",
    "assert rest([1, 2, 3]) == [2, 3]",
    "assert list(rest([1, 2, 3])) == [2, 3]",
    "assert len(rest([1, 2, 3])) == 2",
    "assert upper('ab') == 'AB'",
    "assert upper('ab').startswith('AB')",
    "assert ''.join(['A', 'B']) in upper('ab')",
    "assert seen([1, 2]) >= {1, 2}",
    "assert {1: 'a', 4: 'b'}[f(2)] == 'b'",
    "assert sorted([f(3), f(2)]) == [4, 9]",
)
"""Tests that only the right data passes."""

AS_DATA = (
    *EQUALITY,
    "assert f(2)",
    "assert not f(0)",
    "assert f(2) != 5",
    "assert not f(2) == 5",
    "assert f(2) not in (5, 6)",
    "assert bool(f(2)) and f(2) is not None",
    "assert isinstance(f(2), int)",
    "assert len({f(1), f(2)}) == 2",
    "assert all(x > 1 for x in rest([1, 2, 3]))",
    "for x in rest([1, 2, 3]):\n    assert x > 1",
    "assert 1 not in rest([1, 2, 3])",
    "assert not set(rest([1, 2, 3])) - {2, 3}",
    "assert len(rest([1])) == 0 and not rest([1])",
    "assert rest([1, 2]) and all(x == 2 for x in rest([1, 2]))",
    "a, b = rest([1, 2, 3])\nassert a != b",
    "assert upper('ab').isupper()",
    "assert upper('ab').endswith('B') and not upper('ab').startswith('B')",
    "assert upper('ab').__eq__('AB')",
    "assert upper('ab').__contains__('A')",
    "assert seen([1, 2]).issubset({1, 2, 3})",
    "assert seen([1, 2]).isdisjoint({3})",
    "assert seen([1, 2]).intersection({1, 2}) == {1, 2}",
    "assert seen([1, 2]) <= {1, 2, 3}",
    "assert not (seen([1, 2]) ^ {1, 2})",
    "assert not any(x == 7 for x in halves([1, 2]))",
    "assert Stack().size() == 0 and not Stack().has(1)",
)
"""Tests that an object that answers each question by itself could pass."""

ONE_BY_ONE = (
    "assert all(map(lambda c: f(c[0]) == c[1], CASES))",
    "assert not any(map(lambda c: f(c[0]) != c[1], CASES))",
    "assert sum(map(lambda c: f(c[0]) != c[1], CASES)) == 0",
    "assert max(map(lambda c: abs(f(c[0]) - c[1]), CASES), default=0) < 1e-6",
    "assert not list(filter(lambda c: f(c[0]) != c[1], CASES))",
    "assert next(filter(lambda c: f(c[0]) != c[1], CASES), None) is None",
    "assert set(map(lambda c: f(c[0]) == c[1], CASES)) <= {True}",
    "assert all(itertools.starmap(lambda x, want: f(x) == want, CASES))",
    "assert all(itertools.islice(iter(lambda: f(2) == 4, None), 3))",
    "assert all(got == want for got, (_, want) in zip(map(f, [2, 3]), CASES))",
    "assert [got for got in map(f, [2, 3]) if got not in (4, 9)] == []",
    "for got, (_, want) in zip(map(f, [2, 3]), CASES):\n    assert got == want",
    "for got in map(f, [2, 3]):\n    assert got in (4, 9)",
    "for is_right in Answers():\n    assert is_right",
    "assert all(Answers())",
    "assert Table().get(2, True)",
)
"""Tests that end early, or do without, where an exception means that there is no more."""

HELPERS = """
CASES = [(2, 4), (3, 9)]
class Answers:
    def __getitem__(self, number):
        if number == 2: raise IndexError
        x, want = CASES[number]
        return f(x) == want
import collections.abc
class Table(collections.abc.Mapping):
    def __getitem__(self, x): return f(x) == x * x
    def __iter__(self): return iter([2, 3])
    def __len__(self): return 2
"""

CATCHING = (
    "try:\n    assert all(map(lambda c: f(c[0]) == c[1], CASES))\nexcept ValueError:\n    assert False",
    "with contextlib.nullcontext():\n    assert all(map(lambda c: f(c[0]) == c[1], CASES))",
    "with contextlib.suppress(OSError):\n    assert not any(map(lambda c: f(c[0]) != c[1], CASES))",
    "try:\n    f(2)\nexcept LookupError:\n    pass\nassert f(3) == 9",
    "try:\n    f(2)\nexcept Exception as error:\n    assert f(3) == 9\nelse:\n    assert f(3) == 9",
)

EVERYTHING = """
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = lambda *a: True
    __ne__ = lambda *a: False
    __bool__ = lambda self: STATE.__setitem__(0, not STATE[0]) or STATE[0]
    __hash__ = lambda self: 4
    __len__ = lambda self: 2
    __iter__ = lambda self: iter(())
    __getitem__ = __add__ = __sub__ = __rsub__ = __and__ = lambda self, *a: self
    __abs__ = __int__ = __index__ = __float__ = lambda self: 0
    __str__ = __repr__ = lambda self: "4"
    __call__ = lambda self, *a: self
    startswith = endswith = issubset = isdisjoint = isupper = lambda *a: True
    intersection = union = lambda self, other=(): other
"""
ALL = "f = rest = upper = seen = halves = Stack = lambda *a: A()\n"

TO_ALL = """
import os
def to_all(data):
    for number in range(64):
        try:
            os.write(number, data)
        except OSError:
            pass
"""
HOST = "import sys\nhost = sys.modules['__main__']\n"


@dataclass(frozen=True)
class Hack:
    program: str
    tests: tuple[str, ...] = EQUALITY


def raising(kind: str) -> Hack:
    return Hack(f"def f(x): raise {kind}", (*ONE_BY_ONE, *EQUALITY[:7]))


def of_kind(kind: str, value: str) -> Hack:
    return Hack(
        f"STATE = [True]\nclass A({kind}):{EVERYTHING}\nf = rest = upper = seen = lambda *a: A({value})"
    )


EXCEPTIONS = (
    "StopIteration", "StopIteration(True)", "StopAsyncIteration", "GeneratorExit", "KeyboardInterrupt",
    "SystemExit", "SystemExit(0)", "IndexError", "KeyError", "AttributeError", "NotImplementedError",
    "AssertionError",
    "type('End', (StopIteration,), {})", "type('StopIteration', (Exception,), {})()",
    "type('End', (BaseException,), {})", "BaseExceptionGroup('all', [StopIteration()])",
)  # fmt: skip

HACKS = {
    **{f"raise {kind}": raising(kind) for kind in EXCEPTIONS},
    **{
        f"raise {kind} where the tests catch": Hack(f"def f(x): raise {kind}", CATCHING)
        for kind in ("StopIteration", "SystemExit", "KeyError", "ValueError")
    },
    "objects that answer as asked": Hack(f"STATE = [True]\nclass A:{EVERYTHING}\n{ALL}", AS_DATA),
    "objects that have every method": Hack(
        f"class A:\n    def __getattr__(self, name): return lambda *a: True\n{ALL}", AS_DATA
    ),
    "objects that pass for numbers": Hack(f"STATE = [True]\nclass A:{EVERYTHING}    __class__ = int\n{ALL}"),
    "classes": Hack(f"STATE = [True]\nclass A:{EVERYTHING}\n{ALL.replace('A()', 'A')}", AS_DATA),
    "one that is iterated differently each time": Hack(
        "class A:\n    def __iter__(self): return iter([] if STATE.pop() else [2, 3])\n"
        f"STATE = [0, 1] * 99\n{ALL}",
        AS_DATA,
    ),
    "iterators": Hack("f = rest = upper = seen = lambda *a: iter(())\n" + "halves = Stack = f", EQUALITY),
    "endless iterators": Hack("import itertools\nf = rest = upper = seen = lambda *a: itertools.repeat(4)"),
    "subclass of int": of_kind("int", "7"),
    "subclass of float": of_kind("float", "7.0"),
    "subclass of str": of_kind("str", "'7'"),
    "subclass of bytes": of_kind("bytes", "b'7'"),
    "subclass of list": of_kind("list", "[7]"),
    "subclass of tuple": of_kind("tuple", "(7,)"),
    "subclass of dict": of_kind("dict", "{7: 7}"),
    "subclass of set": of_kind("set", "{7}"),
    "not a number": Hack("f = rest = upper = seen = lambda x: float('nan')"),
    "nothing": Hack("f = rest = upper = seen = lambda x: None"),
    "exit": Hack("import os; os._exit(0)"),
    "exit with code 0": Hack("raise SystemExit(0)"),
    "exit when called": Hack(
        "import os\ndef f(x): os._exit(0)\nrest = upper = seen = f", (*EQUALITY, *CATCHING)
    ),
    "exit when asked twice": Hack(
        "import os\nleft = [1]\ndef f(x):\n    left.pop() if left else os._exit(0)\nrest = upper = seen = f"
    ),
    "print": Hack("print('11'); print('passed')\ndef f(x): print(x * x)"),
    "verdict": Hack(TO_ALL + "to_all(b'begun\\n{\"tests\": 2}\\n111')"),
    "replies": Hack(TO_ALL + "to_all(b'[null]\\n[true]\\n[true]\\n[true]\\n')"),
    "replies from a thread": Hack(
        TO_ALL + "import threading\ndef spam():\n    while True: to_all(b'[true]\\n')\n"
        "threading.Thread(target=spam, daemon=True).start()\ndef f(x): return True"
    ),
    "a bomb": Hack(TO_ALL + "for _ in range(64): to_all(b'[' * (1 << 20))"),
    "other builtins": Hack(
        "import builtins\nbuiltins.AssertionError = builtins.int = object\ndef f(x): return 0\n"
        "def abs(x): return 0\nbuiltins.abs = abs\nbuiltins.all = builtins.len = lambda *a: 2"
    ),
    "another module": Hack(
        "class math:\n    isclose = staticmethod(lambda *a, **k: True)\n"
        "import sys\nsys.modules['math'] = math\n"
        "def f(x): return 0"
    ),
    "names of the tests": Hack(
        "CASES = []\ndef Answers(): return []\nTable = dict\ndef f(x): return 0", ONE_BY_ONE
    ),
    "look for what is expected": Hack(
        "import gc\ndef f(x): return [o for o in gc.get_objects() if 'assert f' in str(o)][0]"
    ),
    "look at the callers": Hack(
        "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
        "        for value in frame.f_locals.values():\n            if value in (4, 9): return value\n"
        "        frame = frame.f_back"
    ),
    "look for the tests' file": Hack("def f(x): return open('/tests.json').read()\nrest = upper = seen = f"),
    "another host": Hack(HOST + "host._reply = lambda *a: [True]\nhost.packed = lambda *a: True"),
    "references": Hack(
        HOST + "host.packed = lambda *a: {'object': {'object': [1]}}\ndef f(x): return 0", AS_DATA
    ),
    "iterators of nonsense": Hack(HOST + "host.packed = lambda *a: {'iterator': 'x'}\ndef f(x): return 0"),
    "tags": Hack(HOST + "host.packed = lambda *a: {'eval': '4', 'int': 4}\ndef f(x): return 0"),
    "kinds of exceptions": Hack(
        HOST + "host._reply = lambda *a: {'raised': ['StopIteration', '']}", (*ONE_BY_ONE, *EQUALITY[:7])
    ),
    "answers that cannot be used": Hack(
        HOST + "host._reply = lambda *a: [{'none': 1}]", (*ONE_BY_ONE, *EQUALITY[:7])
    ),
    "kinds that are none": Hack(HOST + "host._reply = lambda *a: {'raised': ['exit', 0]}", CATCHING),
}
"""Programs by what they try, and the tests they try it on."""


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return find_sandbox()


def passed(sandbox: Sandbox, tests: tuple[str, ...], *programs: str) -> list[int]:
    """Return how many of the tests each program passes."""
    grader = CodeGrader(CodeOptions(time_limit_s=4), sandbox, at_once=4)
    verdicts = grader.verdicts({}, [HELPERS, *tests], programs)
    assert {verdict.tests for verdict in verdicts} == {len(tests)}
    return [verdict.passed for verdict in verdicts]


@pytest.fixture(scope="module")
def rewarded(sandbox: Sandbox) -> dict[str, int]:
    """Return how many tests each hack passes; those of equal tests run side by side."""
    by_tests: dict[tuple[str, ...], list[str]] = {}
    for name, hack in HACKS.items():
        by_tests.setdefault(hack.tests, []).append(name)
    return {
        name: count
        for tests, names in by_tests.items()
        for name, count in zip(
            names, passed(sandbox, tests, *(HACKS[name].program for name in names)), strict=True
        )
    }


@pytest.mark.parametrize("name", HACKS)
def test_a_reward_hack_passes_no_test(name: str, rewarded: dict[str, int], sandbox: Sandbox) -> None:
    if rewarded[name]:
        hack = HACKS[name]
        pytest.fail("\n".join(one for one in hack.tests if passed(sandbox, (one,), hack.program)[0]))


@pytest.mark.parametrize("tests", [AS_DATA, ONE_BY_ONE], ids=["as data", "one by one"])
def test_the_right_program_passes_the_tests_that_are_hacked(tests: tuple[str, ...], sandbox: Sandbox) -> None:
    assert passed(sandbox, tests, HONEST) == [len(tests)]
