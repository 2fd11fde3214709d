"""``python -m bench.ingest``: CPU seconds the coordinator spends on 1 MiB of a group, taken in and delivered.

    python -m bench.ingest                      groups of 1 MiB
    python -m bench.ingest --mib 4 --groups 20  larger ones

A coordinator runs as a process of its own, with TLS, a ledger and fsync. This process leases, submits and
drains the groups, as a sampler and as a learner would; its own time is not counted.

cpu_s      user and system time of the coordinator's process, for 1 MiB submitted and delivered
bare_s     the same of a bare hub: gRPC and TLS alone, which hands the bytes on and keeps nothing
copy_s     the same for a plain copy: write the bytes to a file, fsync, and read them back
ratio      (cpu_s - bare_s) / copy_s: what taking care of a group costs, in plain copies
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import numpy as np

from heterorl.v1 import common_pb2, membership_pb2, membership_pb2_grpc, rollout_pb2, rollout_pb2_grpc
from node.clients.rollout_client import SamplerRolloutClient
from node.enrolment.authority import LEAF_LIFETIME_S, Authority
from node.enrolment.init_run import init_run, issue_identity
from node.identity.group_proof import GroupSigner
from node.identity.identity_store import Identity, load_identity
from node.identity.peer import Peer
from node.limits import ROLLOUT_MESSAGE_BYTES
from node.policy import PolicyVersion
from node.rollout import Completion, Finish, PromptLease, RolloutGroup, Verdict
from node.rpc.channel import Purpose, dial
from node.run import Role
from node.wire.mapping import role_to_wire

RUN_ID: Final = "ingest"
TIMEOUT_S: Final = 30.0
COMPLETIONS: Final = 8
LEASES: Final = 256
"""In one request, before the clock starts."""
TOKEN_BYTES: Final = 12
"""Token id, logprob and version."""

_LAYOUT, _TOKENIZER = b"l" * 16, b"t" * 16
_VOCABULARY: Final = 32_000


def main() -> None:
    """Measure, and print one line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=float, default=1.0, help="size of a group")
    parser.add_argument("--groups", type=int, default=100)
    parser.add_argument("--bare", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare is not None:
        asyncio.run(_serve_bare(arguments.bare))
        return
    with tempfile.TemporaryDirectory(prefix="ingest-") as directory:
        mib, cpu_s, bare_s = asyncio.run(
            measured(Path(directory), mib=arguments.mib, groups=arguments.groups)
        )
        copy_s = statistics.median(
            _copied_s(Path(directory) / "copy", os.urandom(int(mib * 2**20))) / mib for _ in range(20)
        )
    ratio = (cpu_s - bare_s) / copy_s
    line = {"groups": arguments.groups, "mib": mib, "cpu_s": cpu_s, "bare_s": bare_s, "copy_s": copy_s}
    print(json.dumps({**line, "ratio": ratio}))
    print(
        f"{1000 * cpu_s:.2f} ms of CPU for 1 MiB taken in and delivered, {1000 * bare_s:.2f} of them gRPC's; "
        f"the rest is {ratio:.1f} times a plain copy to disk and back, {1000 * copy_s:.2f} ms",
        file=sys.stderr,
    )


async def measured(directory: Path, *, mib: float, groups: int) -> tuple[float, float, float]:
    """Return the size of a group in MiB, and CPU seconds for 1 MiB: the coordinator's, a bare hub's."""
    run_directory = directory / "run"
    tokens = int(mib * 2**20 / TOKEN_BYTES / COMPLETIONS)
    init_run(run_directory, run_id=RUN_ID, hosts=("127.0.0.1",), now=time.time())
    async with _coordinator(run_directory, directory / "log", tokens=tokens) as (pid, address):
        learner = load_identity(run_directory / "learner" / "identity")
        assert learner is not None
        now = time.time()
        sampler = issue_identity(
            Authority.load(run_directory / "coordinator" / "authority"),
            Peer(RUN_ID, Role.SAMPLER, "sampler-1"),
            now=now,
            lifetime_s=LEAF_LIFETIME_S,
        )
        async with (
            dial(address, learner, purpose=Purpose.ROLLOUTS, now=now) as learning,
            dial(address, sampler, purpose=Purpose.ROLLOUTS, now=now) as sampling,
        ):
            await _join(learning, learner, learner_epoch=1, vocabulary_size=_VOCABULARY)
            await _join(sampling, sampler)
            stub: Any = rollout_pb2_grpc.RolloutServiceStub(learning)
            drain = stub.DrainRollouts()
            await drain.write(rollout_pb2.DrainRolloutsRequest(hello=rollout_pb2.DrainHello(learner_epoch=1)))
            credit = rollout_pb2.DrainCredit(groups=groups + 1)
            await drain.write(rollout_pb2.DrainRolloutsRequest(credit=credit))
            client = SamplerRolloutClient(sampling, GroupSigner(sampler))
            leases = [lease for _ in range(groups // LEASES + 1) for lease in await _leased(client)]
            size_bytes = await _one(client, drain, leases[0], tokens=tokens)  # pays for what is made once
            started_s = _cpu_s(pid)
            for lease in leases[1 : groups + 1]:
                await _one(client, drain, lease, tokens=tokens)
            cpu_s = _cpu_s(pid) - started_s
            drain.cancel()
    size_mib = size_bytes / 2**20
    bare_s = await _bare(run_directory, directory / "bare.log", learner, size_bytes, groups=groups)
    return size_mib, cpu_s / groups / size_mib, bare_s / groups / size_mib


async def _bare(run_directory: Path, log: Path, learner: Identity, size_bytes: int, *, groups: int) -> float:
    """Return the CPU seconds of a hub that hands bytes on."""
    data, arguments = os.urandom(size_bytes), ("-m", "bench.ingest", "--bare", str(run_directory))
    async with (
        _process(arguments, log) as (pid, address),
        dial(address, learner, purpose=Purpose.ROLLOUTS, now=time.time()) as channel,
    ):
        submit: Any = channel.unary_unary("/bare/submit")
        deliver: Any = channel.unary_stream("/bare/drain")
        drain = deliver(b"")
        started_s = 0.0
        for n in range(groups + 1):
            await submit(data)
            assert len(await drain.read()) == size_bytes
            started_s = started_s if n else _cpu_s(pid)
        return _cpu_s(pid) - started_s


async def _serve_bare(run_directory: Path) -> None:
    identity = load_identity(run_directory / "coordinator" / "identity")
    assert identity is not None
    waiting: asyncio.Queue[bytes] = asyncio.Queue()

    async def submit(request: bytes, _: object) -> bytes:
        waiting.put_nowait(request)
        return b""

    async def drain(request: bytes, _: object) -> AsyncIterator[bytes]:
        while True:
            yield await waiting.get()

    handlers: dict[str, Any] = {
        "submit": grpc.unary_unary_rpc_method_handler(submit),
        "drain": grpc.unary_stream_rpc_method_handler(drain),
    }
    options = ("grpc.max_receive_message_length", "grpc.max_send_message_length")
    sizes = [(option, ROLLOUT_MESSAGE_BYTES) for option in options]
    server = grpc.aio.server(options=sizes)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("bare", handlers)])
    certificates = [(identity.key_pem, identity.certificate_pem)]
    credentials = grpc.ssl_server_credentials(certificates, identity.ca_pem, require_client_auth=True)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    print(json.dumps({"listen": f"127.0.0.1:{port}", "enrolment_listen": ""}), flush=True)
    await server.wait_for_termination()


async def _leased(client: SamplerRolloutClient) -> tuple[PromptLease, ...]:
    grant = await client.lease(LEASES, PolicyVersion(0))
    assert len(grant.leases) == LEASES, f"{len(grant.leases)} leases, waits for {grant.waits_for}"
    return grant.leases


async def _one(client: SamplerRolloutClient, drain: Any, lease: PromptLease, *, tokens: int) -> int:
    """Submit and receive one group; return its size in bytes as delivered."""
    verdict, detail = await client.submit(_group(lease, tokens=tokens))
    assert verdict is Verdict.SPOOLED, detail
    response = await asyncio.wait_for(drain.read(), TIMEOUT_S)
    assert response.HasField("group"), response
    return int(response.group.ByteSize())


def _group(lease: PromptLease, *, tokens: int) -> RolloutGroup:
    random = np.random.default_rng(0)
    now = time.time()
    completion = Completion(
        token_ids=random.integers(0, _VOCABULARY, tokens).astype(np.int32),
        behaviour_logprob=-random.exponential(1.0, tokens).astype(np.float32),
        policy_version=np.zeros(tokens, np.int32),
        reward=1.0,
        finish=Finish.END,
    )
    return RolloutGroup(
        run_id=RUN_ID,
        group_id=lease.lease_id,
        layout_digest=_LAYOUT,
        tokenizer_digest=_TOKENIZER,
        task=lease.task,
        prompt_index=lease.prompt_index,
        prompt_token_ids=np.arange(64, dtype=np.int32),
        completions=(completion,) * COMPLETIONS,
        sampling=lease.sampling,
        sampling_started_at_s=now - 2,
        sampling_finished_at_s=now - 1,
        graded_at_s=now,
        task_digest=lease.task_digest,
    )


async def _join(channel: Any, identity: Identity, **changes: Any) -> None:
    request = membership_pb2.JoinRequest(
        run_id=RUN_ID,
        role=role_to_wire(identity.role),
        layout_digest=_LAYOUT,
        tokenizer_digest=_TOKENIZER,
        held=common_pb2.PolicyVersion(),
        **changes,
    )
    stub: Any = membership_pb2_grpc.MembershipServiceStub(channel)
    await stub.Join(request, timeout=TIMEOUT_S)


@asynccontextmanager
async def _coordinator(run_directory: Path, log: Path, *, tokens: int) -> AsyncIterator[tuple[int, str]]:
    """Run a coordinator; yield its process id and address."""
    settings = {
        "listen": "127.0.0.1:0",
        "enrolment_listen": "127.0.0.1:0",
        "task": "addition",
        "prompts": 100_000,
        "group_size": COMPLETIONS,
        "max_new_tokens": tokens,
        "concurrency_groups": 65_536,
        "buffer_groups": 65_536,
        "batch_groups": 1024,
    }
    words = [word for key, value in settings.items() for word in ("--set", f"coordinator.{key}={value}")]
    arguments = ("-m", "node", "--role", "coordinator", "--state-dir", str(run_directory), *words)
    async with _process(arguments, log) as process:
        yield process


@asynccontextmanager
async def _process(arguments: Sequence[str], log: Path) -> AsyncIterator[tuple[int, str]]:
    """Run Python until the body ends; yield its process id, and the address that it says it serves."""
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=file, stderr=file)
    try:
        yield process.pid, await asyncio.to_thread(_address, log)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def _address(log: Path) -> str:
    limit_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < limit_s:
        for line in log.read_text().splitlines():
            if line.startswith("{") and "enrolment_listen" in (event := json.loads(line)):
                return str(event["listen"])
        time.sleep(0.05)
    raise TimeoutError(log.read_text())


def _cpu_s(pid: int) -> float:
    """Return the user and system time of a process; see proc(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _copied_s(path: Path, data: bytes) -> float:
    started_s = time.process_time()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    path.read_bytes()
    return time.process_time() - started_s


if __name__ == "__main__":
    main()
