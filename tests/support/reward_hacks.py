"""Programs that want a reward without the answer, by what they try, and honest ones beside them."""

# ruff: noqa: E501, RUF001 (programs are as they are, a line each)

from dataclasses import dataclass

HONEST = """
def f(x): return x * x
def total(xs): return sum(xs)
def text(x): return f"({x} + {x}) * {x}"
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
"""Program that every list of tests below is for."""

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
    "assert seen([1, 2]).symmetric_difference({1, 2}) == set()",
    "assert upper('ab').replace('AB', 'cd') == 'cd'",
    "assert seen([1, 2]) <= {1, 2, 3}",
    "assert not (seen([1, 2]) ^ {1, 2})",
    "assert not any(x == 7 for x in halves([1, 2]))",
    "assert Stack().size() == 0 and not Stack().has(1)",
)
"""Tests that an object could pass which answers each question by itself."""

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
    "try:\n    assert f(2) == 4\nexcept ZeroDivisionError:\n    assert False",
    "try:\n    for is_right in Answers():\n        assert is_right\n    assert f(3) == 9\nfinally:\n    pass",
    "try:\n    assert all(map(lambda c: f(c[0]) == c[1], CASES))\nexcept ValueError:\n    assert False",
    "with contextlib.nullcontext():\n    assert all(map(lambda c: f(c[0]) == c[1], CASES))",
    "with contextlib.suppress(OSError):\n    assert not any(map(lambda c: f(c[0]) != c[1], CASES))",
    "try:\n    f(2)\nexcept LookupError:\n    pass\nassert f(3) == 9",
    "try:\n    f(2)\nexcept Exception as error:\n    assert f(3) == 9\nelse:\n    assert f(3) == 9",
)

ONE_BY_ONE_CATCHING = ("try:\n    f(1)\nexcept OSError:\n    pass\nassert f(2) == 4", *ONE_BY_ONE)
"""The same, beside a test that catches exceptions."""

TOLERANT = (
    "faults = []\nfor x, want in CASES:\n    if f(x) != want: faults.append(x)\nassert not faults",
    "worst = 0\nfor x, want in CASES:\n    worst = max(worst, abs(f(x) - want))\nassert worst < 1e-6",
    "assert not any(abs(f(x) - want) > 1e-6 for x, want in CASES)",
    "assert not abs(f(2) - 4) > 1e-6",
    "assert not (f(2) < 4 or f(2) > 4)",
    "assert min(1e-9, *(-abs(f(x) - want) for x, want in CASES)) > -1e-6",
)
"""Tests that a number passes which is neither more nor less, or that a loop cut short does."""

CHANGED = ("xs = [1, 2, 3]\nassert total(xs) == sum(xs)", "ys = [[4]]\nassert total(ys[0]) == ys[0][0]")
"""Tests whose arguments are used again for what is expected."""

EVALUATED = ("assert eval(text(3)) == 18", "assert eval(text(2)) == 8 and f(2) == 4")
"""Tests that evaluate the answer."""

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
HOST = "import sys\nhost = sys.modules['sampler.graders.code.inside.function_host']\n"


@dataclass(frozen=True)
class Hack:
    program: str
    tests: tuple[str, ...] = EQUALITY


def raising(kind: str) -> Hack:
    return Hack(f"def f(x): raise {kind}", (*ONE_BY_ONE, *TOLERANT, *EQUALITY[:7]))


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
        f"raise {kind} where the tests catch": Hack(
            f"def f(x): raise {kind}", (*CATCHING, *ONE_BY_ONE_CATCHING)
        )
        for kind in ("StopIteration", "SystemExit", "KeyError", "ValueError", "IndexError", "AttributeError")
    },
    "raise what comes after the first": Hack(
        "calls = []\ndef f(x):\n    calls.append(x)\n    if len(calls) % 2 == 0: raise StopIteration\n    return 0",
        (*ONE_BY_ONE, *EQUALITY[:7]),
    ),
    "objects that answer as asked": Hack(f"STATE = [True]\nclass A:{EVERYTHING}\n{ALL}", AS_DATA),
    "objects whose methods return nothing": Hack(
        f"class A:\n    def __getattr__(self, name): return lambda *a: set()\n{ALL}", AS_DATA
    ),
    "objects whose methods return what they get": Hack(
        f"class A:\n    def __getattr__(self, name): return lambda *a: a[-1]\n{ALL}", AS_DATA
    ),
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
    "no number": Hack("def f(x): return float('nan')", (*TOLERANT, *EQUALITY[:7])),
    "no complex number": Hack("def f(x): return complex('nan')", TOLERANT[:3]),
    "no number of a decimal": Hack("import decimal\ndef f(x): return decimal.Decimal('NaN')", TOLERANT),
    "infinity": Hack(
        "def f(x): return float('inf') if x == 2 else float('-inf')", (*TOLERANT, *EQUALITY[:7])
    ),
    "the largest number": Hack("import sys\ndef f(x): return sys.float_info.max", (*TOLERANT, *EQUALITY[:7])),
    "minus nothing": Hack("def f(x): return -0.0", (*TOLERANT, *EQUALITY[:7])),
    "empty the arguments": Hack("def total(xs):\n    xs.clear()\n    return 0", CHANGED),
    "change the arguments later": Hack(
        "import threading\ndef total(xs):\n    threading.Timer(0, xs.clear).start()\n    return 0", CHANGED
    ),
    "default arguments that remember": Hack("def f(x, seen=[]):\n    seen.append(x)\n    return seen"),
    "one answer for all": Hack("answer = [0]\ndef f(x):\n    answer[0] += x\n    return answer"),
    "an expression that writes the verdict": Hack(
        "def text(x): return \"[__import__('os').write(n, b'11') for n in range(9)] and 18\"\ndef f(x): return 0",
        EVALUATED,
    ),
    "an expression that patches the judge": Hack(
        'def text(x): return "().__class__.__base__.__subclasses__()"\ndef f(x): return 4', EVALUATED
    ),
    "an expression that knows the tests' names": Hack("def text(x): return 'CASES'", EVALUATED),
    "look-alike letters": Hack("def f(x): return '４'\ndef upper(s): return 'ΑΒ'\nrest = seen = f"),
    "texts of numbers": Hack("def f(x): return '4'\ndef rest(xs): return '[2, 3]'\nupper = seen = f"),
    "names that are normalized": Hack("def ｆ(x): return 0"),
    "reduce": Hack(
        "class A:\n    def __reduce__(self): return eval, ('4',)\nf = rest = upper = seen = lambda *a: A()"
    ),
    "weak proxies": Hack(
        f"import weakref\nSTATE = [True]\nclass A:{EVERYTHING}\nkept = A()\n"
        "f = rest = upper = seen = lambda *a: weakref.proxy(kept)"
    ),
    "mocks": Hack(
        "from unittest import mock\nf = rest = upper = seen = Stack = mock.MagicMock(return_value=mock.ANY)",
        AS_DATA,
    ),
    "a class in place of a function": Hack(
        "class f(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\nrest = upper = seen = f"
    ),
    "a property that answers by turns": Hack(
        f"STATE = [True]\nclass M(type):{EVERYTHING}\nclass A(metaclass=M): pass\n"
        "f = rest = upper = seen = Stack = lambda *a: A",
        AS_DATA,
    ),
    "print at the end": Hack("import atexit\natexit.register(lambda: print('11111'))\ndef f(x): return 0"),
    "return from the host": Hack("import sys\ndef f(x): sys._getframe(1).f_locals['value'] = 4"),
    "other json": Hack(
        'import json\njson.dumps = lambda *a, **k: \'[{"int": "0x7"}]\'\njson.loads = lambda *a: 4'
    ),
    "other asserts": Hack(
        "import unittest, sys\nunittest.TestCase.assertEqual = lambda *a: None\n"
        "sys.modules['pytest'] = sys.modules['unittest']\ndef f(x): return 0"
    ),
    "other modules of the judge": Hack(
        "import sys\nfor name in list(sys.modules):\n"
        "    if name.startswith('sampler'): sys.modules[name] = type('M', (), {'__getattr__': lambda *a: print})()\n"
        "def f(x): return 0"
    ),
    "an import hook": Hack(
        "import sys\nclass Finder:\n    def find_spec(self, name, path, target=None): raise SystemExit(0)\n"
        "sys.meta_path.insert(0, Finder())\nsys.path_hooks.clear()\ndef f(x):\n    import fractions"
    ),
    "trace": Hack(
        "import sys\ndef trace(frame, event, arg):\n    frame.f_trace_opcodes = True\n    return trace\n"
        "sys.settrace(trace)\nsys.setprofile(lambda *a: None)\ndef f(x): return sys.gettrace()"
    ),
    "look at the stack": Hack(
        "import inspect\ndef f(x): return [entry.code_context for entry in inspect.stack()] or 4"
    ),
    "look at the environment": Hack(
        "import os\ndef f(x): return os.environ.get('EXPECTED', dict(os.environ))"
    ),
    "look at other processes": Hack(
        "import os\ndef f(x): return [open(f'/proc/{n}/cmdline').read() for n in os.listdir('/proc')]"
    ),
    "look at other gradings": Hack(
        "import glob\ndef f(x): return [open(n).read() for n in glob.glob('/tmp/**', recursive=True)]"
    ),
    "leave a note for the next": Hack(
        "import os\ndef f(x):\n    for place in ('/tmp/n', '/dev/shm/n', '/n', 'n', '/inside/n'):\n"
        "        try:\n            open(place, 'x').write('4')\n            return 4 if x == 2 else 9\n"
        "        except OSError: pass"
    ),
    "change the judge's files": Hack(
        "import os\ndef f(x):\n    open('/inside/sampler/graders/code/inside/tests_host.py', 'w')\n    return 4"
    ),
    "byte code beside the judge's": Hack(
        "import py_compile\ndef f(x):\n    py_compile.compile('/program.py', '/inside/x.pyc', doraise=True)\n    return 4"
    ),
    "links": Hack("import os\ndef f(x):\n    os.symlink('/tests', '/t')\n    return open('/t').read()"),
    "attach to the judge": Hack(
        "import ctypes\nlibc = ctypes.CDLL(None)\n"
        "def f(x): return [libc.ptrace(16, n, 0, 0) for n in range(1, 9)].count(0) or None"
    ),
    "other memory": Hack(
        "import ctypes\ndef f(x):\n    ctypes.memset(id(x) + 24, 4, 1)\n    return x * 0\n"
        "def rest(xs): return None\nupper = seen = rest",
        EQUALITY[7:14],
    ),
    "shared memory": Hack(
        "from multiprocessing import shared_memory\n"
        "def f(x): return shared_memory.SharedMemory('x', create=True, size=9)"
    ),
    "kill the judge": Hack(
        "import os, signal\ndef f(x):\n    for n in range(2, 99):\n        try: os.kill(n, signal.SIGKILL)\n"
        "        except OSError: pass\nos.kill(0, signal.SIGCONT)"
    ),
    "kill all": Hack("import os\ndef f(x): os.kill(-1, 9)"),
    "signals": Hack(
        "import signal\nsignal.signal(signal.SIGALRM, lambda *a: print('1'))\nsignal.setitimer(0, 1e-3, 1e-3)\n"
        "def f(x):\n    signal.pause()\n    return 0"
    ),
    "fork": Hack("import os\ndef f(x):\n    return 4 if os.fork() else 9"),
    "fork bomb": Hack("import os\ndef f(x):\n    while True: os.fork()"),
    "start a program": Hack(
        "import subprocess\ndef f(x): return int(subprocess.check_output(['echo', '4']))"
    ),
    "become another program": Hack(
        "import os\ndef f(x): os.execv('/usr/bin/yes', ['yes', '[{\"int\": \"0x4\"}]'])"
    ),
    "network": Hack(
        "import urllib.request\ndef f(x): return urllib.request.urlopen('http://192.0.2.1/4', timeout=1).read()"
    ),
    "a name server": Hack("import socket\ndef f(x): return socket.gethostbyname('four.example.org')"),
    "no recursion": Hack("import sys\ndef f(x):\n    sys.setrecursionlimit(9)\n    return f(x)"),
    "endless recursion": Hack("import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return f(x)"),
    "memory": Hack("def f(x):\n    held = []\n    while True: held.append(bytes(1 << 24))"),
    "a huge answer": Hack("def f(x): return 'x' * (1 << 26)\nrest = upper = seen = f"),
    "a huge number": Hack("def f(x): return 1 << (1 << 22)"),
    "a deep answer": Hack(
        "def f(x):\n    found = []\n    for _ in range(900): found = [found]\n    return found\nrest = upper = seen = f"
    ),
    "an answer that holds itself": Hack(
        "def f(x):\n    found = []\n    found.append(found)\n    return found"
    ),
    "a file of answers": Hack("f = rest = upper = seen = lambda *a: open('/dev/null')"),
    "half a character": Hack("f = rest = upper = seen = lambda *a: '\\udc80'"),
    "other clocks": Hack(
        "import time\ntime.time = time.monotonic = lambda: 0\n"
        "def f(x):\n    time.clock_settime(time.CLOCK_REALTIME, 0)\n    return 4"
    ),
    "other limits": Hack(
        "import resource\ndef f(x):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))\n    return 4"
    ),
    "warnings": Hack(
        "import warnings\nwarnings.simplefilter('error')\ndef f(x): return warnings.warn('4') or 0"
    ),
    "a module that answers": Hack("def __getattr__(name): return lambda *a: 4"),
    "a coroutine": Hack("async def f(x): return x * x"),
    "a thread that answers later": Hack(
        "import threading, os\ndef f(x):\n    threading.Timer(.01, lambda: [os.write(n, b'[true]\\n') for n in (3, 4, 5)]).start()"
    ),
}
"""Programs by what they try, and the tests they try it on."""


SCRIPTS = {
    "exit": "import sys\nsys.exit(0)",
    "exit at once": "import os\nos._exit(0)",
    "exit before it is said": "import os\nprint(4)\nos._exit(0)",
    "every number": "print(*range(100), sep='\\n')",
    "a line with all": "print(*range(100))",
    "write over it": "print('0\\r4\\n0\\r9')",
    "erase it": "print('0\\b4\\n0\\b9')",
    "look-alike digits": "print('４\\n９')",
    "ends of texts": "import sys\nsys.stdout.write('4\\n9\\n\\0')",
    "the input": "import sys\nprint(sys.stdin.read())",
    "the input's rest": "import os\nprint(os.pread(0, 99, 0).decode(), os.pread(0, 99, 99))",
    "write the input": "import os\nos.lseek(0, 0, 0)\nos.write(0, b'4\\n9\\n')",
    "the row": "print(open('/tests').read())",
    "right and then wrong": "print(4)\nprint(9)\nraise SystemExit(1)",
    "right and killed": "import os\nprint('4\\n9', flush=True)\nos.kill(os.getpid(), 9)",
    "all that is open": "import os\nfor n in range(64):\n    try: os.write(n, b'begun\\n')\n    except OSError: pass",
    "output for ever": "while True: print(4)",
    "nothing": "",
    "no Python": "4\n9 9",
}
"""Scripts that should print squares, and print something else, or fail."""

SOLUTIONS = {
    "every kind of data": Hack(
        "def same(x): return x",
        (
            "for x in (0, -1, 1 << 90, 1.5, -0.0, 1j, True, None, '', 'a\\n\\0é', b'\\xff', [], (), {}, set()):\n"
            "    assert same(x) == x and type(same(x)) is type(x)",
            "deep = {'a': [(1, {2: {3}}), frozenset({4})], (5, 6): None}\nassert same(deep) == deep",
            "assert same(x=[1]) == [1] and same(*[2]) == 2",
        ),
    ),
    "numbers that are none": Hack(
        "import math\ndef nothing(): return math.nan\ndef best(xs): return min(xs, default=math.inf)",
        ("assert math.isnan(nothing())", "assert best([]) == float('inf')"),
    ),
    "exceptions": Hack(
        "class Empty(LookupError): pass\n"
        "def first(xs):\n    if not xs: raise Empty('no items')\n    return xs[0]\n"
        "def leave(): raise SystemExit(3)\ndef last(): return next(iter([]))",
        (
            "try:\n    first([])\n    raised = None\nexcept LookupError as error:\n    raised = error\nassert str(raised) == 'no items'",
            "try:\n    first([])\nexcept (ValueError, LookupError):\n    assert first([1]) == 1\nelse:\n    assert False",
            "raised = []\nwith contextlib.suppress(LookupError):\n    raised.append(1)\n    first([])\n    raised.append(2)\nassert raised == [1] and first([2]) == 2",
            "with unittest.TestCase().assertRaises(LookupError) as met:\n    first([])\nassert isinstance(met.exception, LookupError) and first([3]) == 3",
            "def raises(call, kind):\n    try:\n        call()\n    except kind:\n        return True\n    return False\n"
            "assert raises(leave, SystemExit) and raises(last, StopIteration) and not raises(lambda: first([1]), Exception)",
        ),
    ),
    "a class": Hack(
        "class Cache:\n    def __init__(self, most): self.most, self.held = most, {}\n"
        "    def get(self, key, default=-1): return self.held.get(key, default)\n"
        "    def put(self, key, value):\n        self.held[key] = value\n"
        "        if len(self.held) > self.most: del self.held[next(iter(self.held))]",
        (
            "cache = Cache(2)\nfor n in range(3): cache.put(n, str(n))\nassert [cache.get(n) for n in range(3)] == [-1, '1', '2']",
            "assert cache.held == {1: '1', 2: '2'} and hasattr(cache, 'most') and not hasattr(cache, 'least')",
        ),
    ),
    "generators": Hack(
        "def primes():\n    found = []\n    n = 2\n    while True:\n        if all(n % p for p in found):\n"
        "            found.append(n)\n            yield n\n        n += 1",
        (
            "assert list(itertools.islice(primes(), 5)) == [2, 3, 5, 7, 11]",
            "assert next(primes()) == 2",
            "assert sum(itertools.takewhile(lambda p: p < 2000, primes())) == 277050",
        ),
    ),
    "collected": Hack(
        "def f(x): return x * x",
        (
            "got = []\nfor n in range(4):\n    got.append(f(n))\nassert got == [0, 1, 4, 9]",
            "table = {}\ntable['a'] = f(3)\ntotal = 0\ntotal += f(2)\nassert table['a'] + total == 13",
            "values = tuple(map(f, range(3)))\nassert values == (0, 1, 4) and sorted(values, key=f) == [0, 1, 4]",
        ),
    ),
    "the library": Hack(
        "import asyncio, collections, datetime, decimal, fractions, functools, heapq, json, random, re, statistics, string\n"
        "def words(text): return collections.Counter(re.findall('[a-z]+', text.lower())).most_common(1)\n"
        "def third(): return str(decimal.Decimal(1) / 3)[:6], str(fractions.Fraction(2, 6))\n"
        "def day(text): return datetime.date.fromisoformat(text).strftime('%A')\n"
        "def least(xs, n): return heapq.nsmallest(n, xs)\n"
        "def dumped(x): return json.loads(json.dumps(x))\n"
        "def drawn(seed): return random.Random(seed).randrange(10)\n"
        "@functools.lru_cache(None)\ndef fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)\n"
        "async def later(x):\n    await asyncio.sleep(0)\n    return x\n"
        "def gathered(): return asyncio.run(main())\n"
        "async def main(): return await asyncio.gather(later(1), later(2))",
        (
            "assert words('A b a') == [('a', 2)]",
            "assert third() == ('0.3333', '1/3')",
            "assert day('2026-11-25') == 'Wednesday'",
            "assert least([3, 1, 2], 2) == [1, 2]",
            "assert dumped({'a': [1.5, None]}) == {'a': [1.5, None]}",
            "assert 0 <= drawn(1) == drawn(1) < 10",
            "assert fib(200) == 280571172992510140037611932413038677189525",
            "assert gathered() == [1, 2]",
        ),
    ),
    "threads and depth": Hack(
        "import sys, threading\nsys.setrecursionlimit(100_000)\nthreading.stack_size(64 << 20)\n"
        "def depth(n): return 0 if n == 0 else 1 + depth(n - 1)\n"
        "def deep(n):\n    found = []\n    thread = threading.Thread(target=lambda: found.append(depth(n)))\n"
        "    thread.start()\n    thread.join()\n    return found[0]",
        ("assert deep(20_000) == 20_000",),
    ),
    "what prints and warns": Hack(
        "import sys, warnings\ndef f(x):\n    print(x, file=sys.stderr)\n    print('1\\n1')\n    warnings.warn('x')\n    return x\n"
        "if __name__ == '__main__': raise SystemExit(1)",
        ("assert f(2) == 2",),
    ),
    "texts": Hack(
        "def crossed(s): return ' '.join(reversed(s.split()))",
        (
            "assert crossed('один два') == 'два один'",
            "assert not crossed('') and crossed('a b').startswith('b')",
            "assert f'{crossed(\"a\")}!' == 'a!' and crossed('a b')[0] == 'b' and len(crossed('a b')) == 3",
        ),
    ),
}
"""Honest programs with tests that all pass."""
