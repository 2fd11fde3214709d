"""Programs that want out of the sandbox, for real; each says what it met."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from deploy.check import DEPLOY
from sampler.graders.code import sandbox as sandbox_module
from sampler.graders.code.code_options import CodeOptions
from sampler.graders.code.program_runs import ProgramResult, ProgramRuns, completion_limit_s, end
from sampler.graders.code.sandbox import Sandbox, find_sandbox
from sampler.tasks.task import GraderOutageError, Outage
from support.refusals import cannot_start

pytestmark = pytest.mark.needs("bwrap", "libseccomp")

OPTIONS = CodeOptions(tests="stdin", time_limit_s=1, most_tests=3, memory_limit_bytes=256 << 20)
LONGER = OPTIONS.model_copy(update={"time_limit_s": 10})
PATIENCE_S = 20.0
"""For a busy machine, beyond the limits."""

TRY = """
import ctypes, os, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def tried(*attempts):
    for attempt in attempts:
        try:
            found = attempt()
        except (OSError, MemoryError, RuntimeError, ImportError) as error:
            continue
        if found != -1:
            print("done:", repr(found)[:200])
            return
    print("no way")
"""


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return find_sandbox()


def all_ran(
    sandbox: Sandbox, programs: Sequence[str], *, prints: str, given: str = ""
) -> list[ProgramResult]:
    """Run programs; their one test is what they print. Nothing that they started is left."""
    tests = [{"input": given, "output": prints}]
    before = set(psutil.Process().children(recursive=True))
    grader = ProgramRuns(OPTIONS, sandbox, at_once=len(programs))
    verdicts = grader.verdicts({}, tests, [TRY + program for program in programs])
    assert set(psutil.Process().children(recursive=True)) <= before
    return verdicts


def ran(sandbox: Sandbox, program: str, *, prints: str = "no way", given: str = "") -> ProgramResult:
    return all_ran(sandbox, [program], prints=prints, given=given)[0]


PASSED = ProgramResult(1, 1)


def test_what_a_program_reads_and_prints_is_its_own(sandbox: Sandbox) -> None:
    assert ran(sandbox, "print(sum(map(int, sys.stdin)))", given="1\n2\n3\n", prints="6") == PASSED


ESCAPES = {
    name: program
    for name, _, program in (
        section.partition("\n")
        for section in Path(__file__).with_name("escapes.txt").read_text().split("\n=== ")[1:]
    )
}


TRY_ALL = """
for name, code in ESCAPES.items():
    print("#" + name)
    try:
        exec(code, dict(globals()))
    except BaseException as error:
        print(repr(error))
"""


@pytest.fixture(scope="module")
def owned() -> Iterator[Path]:
    """Make a directory on this machine's disk: a sandbox has a /dev of its own, whatever else it sees."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        yield Path(directory)


@pytest.fixture(scope="module")
def met(sandbox: Sandbox, owned: Path) -> dict[str, str]:
    """Return what each escape printed; all are tried in one sandbox."""
    secret = owned / "api.key"
    secret.write_text("sesame")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        escapes = repr(ESCAPES).replace("SECRET", str(secret)).replace("DIRECTORY", str(owned))
        escapes = escapes.replace("PORT", str(server.getsockname()[1]))
        escapes = escapes.replace("PYTHON", os.path.realpath(sys.executable))
        program = f"{TRY}ESCAPES = {escapes}{TRY_ALL}".encode()

        async def printed() -> tuple[int | None, bytes]:
            deadline_s = asyncio.get_running_loop().time() + 3 * PATIENCE_S
            return await ProgramRuns(LONGER, sandbox, at_once=1)._run(program, b"", deadline_s=deadline_s)

        code, output = asyncio.run(printed())
        with pytest.raises(BlockingIOError):
            server.accept()
    assert code == 0, output
    assert list(owned.iterdir()) == [secret]
    sections = output.decode().removeprefix("#").split("\n#")
    return {name: said.strip() for name, _, said in (section.partition("\n") for section in sections)}


@pytest.mark.parametrize("escape", ESCAPES)
def test_a_program_does_not_get_out(escape: str, met: dict[str, str]) -> None:
    assert met[escape] == "no way"


def test_the_environment_the_user_and_the_descriptors_say_nothing(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sesame")
    looks = """
def is_open(number):
    try:
        return bool(os.fstat(number))
    except OSError:
        return False
libc.getenv.restype = ctypes.c_char_p
print(sorted(name for name in os.environ if not name.startswith(("PYTHON", "MALLOC", "PWD", "LC_CTYPE"))))
print(libc.getenv(b"JUDGE_KEY"), os.getuid(), os.getpid() < 9, sum(map(is_open, range(64))))
print(sorted(set(os.listdir("/")) - {"lib32"}))
"""
    roots = {"bin", "dev", "inside", "lib", "lib64", "program.py", "usr", Path(sys.base_prefix).parts[1]}
    said = f"[]\nNone 65534 True 4\n{sorted(roots)}"  # the fourth descriptor is /dev/null
    assert ran(sandbox, looks, prints=said) == PASSED


HANGS = {
    "loop": "while True: pass",
    "loop and ignore": "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
    "sleep": "time.sleep(3600)",
    "stop": "os.kill(os.getpid(), 19)",
    "close and go on": "os.closerange(0, 3)\ntime.sleep(3600)",
    "threads": """
def spin():
    while True: pass
for _ in range(8): threading.Thread(target=spin).start()
""",
}


def test_programs_that_do_not_end_are_ended(sandbox: Sandbox) -> None:
    began = time.monotonic()
    verdicts = all_ran(sandbox, list(HANGS.values()), prints="no way")
    assert dict(zip(HANGS, verdicts, strict=True)) == dict.fromkeys(
        HANGS, ProgramResult(0, 1, timed_out=True)
    )
    assert time.monotonic() - began < completion_limit_s(OPTIONS) + PATIENCE_S


def test_a_sandbox_that_is_ended_while_it_starts_leaves_nothing(sandbox: Sandbox) -> None:
    async def ended_at_once() -> set[int]:
        started = [
            await sandbox.start(
                "script_host", "1", str(1 << 28), files={"program.py": b""}, stdin=-3, stdout=-3
            )
            for _ in range(8)
        ]
        await asyncio.gather(*map(end, started))
        return {process.pid for process in started}

    groups = asyncio.run(ended_at_once())
    assert not [each.pid for each in psutil.process_iter() if group_of(each.pid) in groups]


def group_of(pid: int) -> int | None:
    try:
        is_zombie = psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        return None if is_zombie else os.getpgid(pid)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return None


CRASHES = {
    "exit": "sys.exit(3)",
    "raise": "1 / 0",
    "segfault": "ctypes.string_at(0)",
    "recursion": "sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "a gigabyte of output": "for _ in range(1024): os.write(1, bytes(1 << 20))",
    "output for ever": "while True: os.write(1, b'x' * 65536)",
    "no Python": "}{",
    "fork by its x32 number": "libc.syscall(0x40000000 + 57)",
    "kill all": "os.kill(-1, 9)\nos.kill(0, 9)",
}


def test_programs_that_end_badly_have_failed(sandbox: Sandbox) -> None:
    verdicts = all_ran(sandbox, list(CRASHES.values()), prints="no way")
    for crash, verdict in zip(CRASHES, verdicts, strict=True):
        assert (verdict.passed, verdict.tests) == (0, 1), crash
        assert verdict.crashed or verdict.timed_out, crash


def test_killing_its_parent_and_all_it_can_name_harms_nobody(sandbox: Sandbox) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    kill = f"""
import signal
for number in (1, os.getppid(), {os.getpid()}, {bystander.pid}):
    for which in (signal.SIGKILL, signal.SIGTERM):
        try:
            if number != os.getpid(): os.kill(number, which)
        except ProcessLookupError:
            pass
print("tried")
"""
    try:
        assert ran(sandbox, kill, prints="tried") == PASSED
        assert bystander.poll() is None
    finally:
        bystander.communicate(b"\n")


def test_many_threads_cost_the_program_only(sandbox: Sandbox) -> None:
    bomb = """
threading.stack_size(32768)
started = 0
try:
    while started < 100_000:
        threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
        started += 1
except (RuntimeError, MemoryError):
    print("no more")
sys.stdout.flush()
os._exit(0)
"""
    verdict = ran(sandbox, bomb, prints="no more")
    assert verdict.timed_out or verdict == PASSED


def test_a_machine_without_bubblewrap_or_libseccomp_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def missing() -> bytes:
        raise OSError("libseccomp.so.2: cannot open shared object file")

    monkeypatch.setattr(sandbox_module, "call_filter", missing)
    with cannot_start("libseccomp"):
        find_sandbox()
    monkeypatch.setenv("PATH", str(tmp_path))
    with cannot_start("bwrap", "bubblewrap", "libseccomp2"):
        find_sandbox()


CHECK = "from sampler.graders.code.sandbox import find_sandbox; find_sandbox().check()"
FILTER = f"""
import ctypes, json, sys
library = ctypes.CDLL("libseccomp.so.2")
library.seccomp_init.restype = ctypes.c_void_p
profile = json.load(open(sys.argv[1]))
rules = ctypes.c_void_p(library.seccomp_init({sandbox_module._ALLOW}))
for group in profile["syscalls"]:
    for name in group["names"]:
        if (number := library.seccomp_syscall_resolve_name(name.encode())) >= 0:
            action = {sandbox_module._FAIL_WITH} | group["errnoRet"]
            assert library.seccomp_rule_add(rules, action, number, 0) == 0
assert library.seccomp_load(rules) == 0
"""


def checked(*before: str, program: str = CHECK, profile: str = "") -> str:
    """Try the sandbox in a process that other programs start; return what it says in the end."""
    ended = subprocess.run(
        [*before, sys.executable, "-c", program, profile],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    return "works" if ended.returncode == 0 else ended.stderr


def test_a_machine_without_user_namespaces_is_told_what_to_set() -> None:
    """One user namespace that allows no further one: what a hardened kernel does."""
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    said = checked("unshare", "--user", "--map-root-user", "sh", "-c", forbid, "sh")
    assert "StartupError: The sandbox for programs does not start: bwrap: " in said
    assert ". sysctl user.max_user_namespaces=10000. Or set run_code = false" in said


UNPRIVILEGED = ("unshare", "--user", "--map-user=10001", "--map-group=10001", "setpriv", "--no-new-privs")
"""Another user than root, without capabilities and ways to gain any, as in our image."""


def test_in_a_container_the_sandbox_works_under_our_profile_of_system_calls(tmp_path: Path) -> None:
    profile = DEPLOY / "seccomp.json"
    assert checked(*UNPRIVILEGED, program=FILTER + CHECK, profile=str(profile)) == "works"
    # What containers have by default.
    forbidding = json.loads(profile.read_text())
    forbidding["syscalls"][0]["names"] += ["unshare", "mount", "pivot_root", "sethostname"]
    (tmp_path / "default.json").write_text(json.dumps(forbidding))
    said = checked(*UNPRIVILEGED, program=FILTER + CHECK, profile=str(tmp_path / "default.json"))
    assert "StartupError: The sandbox for programs does not start: bwrap: " in said
    assert "start it with the seccomp profile deploy/seccomp.json" in said
    assert "under systemd, enable heterorl-programs.socket and set programs_socket" in said


def test_a_sandbox_that_stops_working_is_an_outage_and_no_verdict(sandbox: Sandbox) -> None:
    broken = Sandbox("/bin/false", sandbox.filter)
    with pytest.raises(GraderOutageError) as error:
        ran(broken, "print('no way')")
    assert error.value.outage is Outage.NOT_STARTED
    asserting = ProgramRuns(CodeOptions(), broken, at_once=2)
    with pytest.raises(GraderOutageError):
        asserting.verdicts({}, "assert f(1)", ["def f(x): return x"] * 3)
