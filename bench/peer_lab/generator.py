"""A process that holds the connections of many samplers: joins, heartbeats, and how long answers took.

    python -m bench.peer_lab.generator RUN HOST:PORT COUNT EVERY_S

Each peer has a certificate of its own, issued by the run's authority as enrolment would. All peers of a
process have one key: the coordinator knows them by the names in their certificates. Peer 0 is the run's
learner. A peer sends its next heartbeat EVERY_S after an answer, or when the answer says, and metrics when it
is asked to.

On standard output: a line of JSON once all have joined. Then for each line on standard input a line with what
was seen since the last.
"""

import asyncio
import json
import random
import ssl
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, cast

import uvloop

from bench.peer_lab import http2
from bench.shared.played_run import PlayedRun, join_request
from heterorl.v1 import common_pb2, membership_pb2
from node.clients.membership.heartbeats import FIGURES_EVERY_S
from node.enrolment.authority import LEAF_LIFETIME_S
from node.identity.certificates import key_to_pem, new_key
from node.identity.peer import Peer, server_name
from node.rpc.address import split_address
from node.system import descriptors
from node.values.roles import Role

SERVICE: Final = "/heterorl.v1.MembershipService/"
_OPENING: Final = 64
"""Handshakes at once: as many as a fleet that comes back after a cut, thinned out by its backoff."""

_JOIN, _HEARTBEATS = 1, 3
"""Streams of a connection."""

_MACHINE: Final = membership_pb2.MachineFigures(
    disk_free_ratio=0.5, certificate_expiry_s=3e7, mended_frames=0, source_lies=0
)
_SAMPLER: Final = membership_pb2.SamplerFigures(starving_s=0.0, tokens_per_s=1500.0, price_per_hour=0.5)
"""The numbers that a real sampler reports."""


class JoinRefusedError(Exception):
    """A peer was not let in, or its connection ended before."""


class Fleet:
    """The peers of this process, and measurements since the last report."""

    def __init__(self, run: Path, target: str, *, every_s: float, attempts: int = 8) -> None:
        """Prepare to dial ``target``, the coordinator's address."""
        self.target = split_address(target)
        self.every_s, self.attempts = every_s, attempts
        self._authority = PlayedRun(run).authority
        self.run_id = self._authority.run_id
        self.hub = server_name(self.run_id, Role.COORDINATOR)
        self.latencies_s: list[float] = []
        self.pauses_s: list[float] = []
        self.lost = 0
        self.first_loss = ""
        self.connections: set[Connection] = set()
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._context.load_verify_locations(cadata=self._authority.certificate_pem.decode())
        self._context.set_alpn_protocols(["h2"])
        self._key = new_key()
        self._key_pem = key_to_pem(self._key)

    async def open(self, numbers: Sequence[int]) -> None:
        """Connect peers and wait until each has joined and had the answer to a heartbeat."""
        loop, places = asyncio.get_running_loop(), asyncio.Semaphore(_OPENING)

        async def open_one(peer: Peer) -> None:
            for attempt in range(1, self.attempts + 1):
                async with places:
                    joined: asyncio.Future[None] = loop.create_future()
                    await loop.create_connection(
                        lambda: Connection(self, peer, joined),  # noqa: B023
                        *self.target,
                    )
                    try:
                        await joined
                        return
                    except JoinRefusedError:
                        if attempt == self.attempts:
                            raise
                await asyncio.sleep(random.random() * 2**attempt)  # as a peer does that is told to come back

        await asyncio.gather(*(open_one(self._peer(number)) for number in numbers))

    def close(self) -> None:
        """Cut all connections."""
        for connection in tuple(self.connections):
            connection.close()

    def tls(self, peer: Peer) -> tuple[ssl.SSLObject, ssl.MemoryBIO, ssl.MemoryBIO]:
        """Return a client's side of a handshake as ``peer`` and its pipes in and out."""
        certificate = self._authority.issue(
            peer, self._key.public_key(), now=time.time(), lifetime_s=LEAF_LIFETIME_S
        )
        with tempfile.NamedTemporaryFile() as file:
            file.write(certificate + self._key_pem)
            file.flush()
            # The object takes what its context has now: one context serves all peers, one after the other.
            self._context.load_cert_chain(file.name)
        come, go = ssl.MemoryBIO(), ssl.MemoryBIO()
        return self._context.wrap_bio(come, go, server_hostname=self.hub), come, go

    def report(self) -> str:
        """Return what was seen since the last report, and begin anew."""
        seen = {
            "heartbeats": len(self.latencies_s),
            "latencies_s": sorted(self.latencies_s),
            "pause_s": sum(self.pauses_s) / max(1, len(self.pauses_s)),
            "lost": self.lost,
            "first_loss": self.first_loss,
        }
        self.latencies_s, self.pauses_s = [], []
        return json.dumps(seen)

    def _peer(self, number: int) -> Peer:
        if number == 0:
            return Peer(self.run_id, Role.LEARNER, "learner")
        return Peer(self.run_id, Role.SAMPLER, f"sampler-{number}")


class Connection(asyncio.Protocol):
    """One peer: TLS, a join, and a stream of heartbeats."""

    def __init__(self, fleet: Fleet, peer: Peer, joined: "asyncio.Future[None]") -> None:
        self._fleet, self._peer, self._joined = fleet, peer, joined
        self._tls, self._come, self._go = fleet.tls(peer)
        self._reader = http2.Reader(unary=_JOIN)
        self._loop = asyncio.get_running_loop()
        self._is_secure = self._is_lost = False
        self._sequence = 0
        self._sent_s = 0.0
        self._figures_sent_s = -FIGURES_EVERY_S
        self._held = common_pb2.PolicyVersion()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not derived from it
        self._fleet.connections.add(self)
        self._shake_hands()

    def data_received(self, data: bytes) -> None:
        self._come.write(data)
        if not self._is_secure:
            self._shake_hands()
        if self._is_secure:
            try:
                self._read()
            except (http2.CallEndedError, ssl.SSLError) as error:
                self._lose(str(error))

    def close(self) -> None:
        """Cut it."""
        self._is_lost = True
        self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._fleet.connections.discard(self)
        self._lose(f"the connection ended: {error}")

    def _lose(self, why: str) -> None:
        if self._is_lost:
            return
        self._is_lost = True
        self._transport.abort()
        if not self._joined.done():
            self._joined.set_exception(JoinRefusedError(f"{self._peer.node_id} could not join: {why}"))
            return
        self._fleet.lost += 1
        self._fleet.first_loss = self._fleet.first_loss or f"{self._peer.node_id}: {why}"

    def _shake_hands(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return
        self._is_secure = True
        self._send(
            http2.greeting()
            + http2.call(_JOIN, f"{SERVICE}Join", self._fleet.hub)
            + http2.message(_JOIN, self._join().SerializeToString(), is_last=True)
        )

    def _read(self) -> None:
        while True:
            try:
                data = self._tls.read(1 << 16)
            except ssl.SSLWantReadError:
                self._flush()  # an answer to a change of keys, for instance
                return
            if not data:
                raise http2.CallEndedError("the server closed")
            messages, answer = self._reader.take(data)
            if answer:
                self._send(answer)
            for stream, content in messages:
                if stream == _JOIN:
                    self._send(http2.call(_HEARTBEATS, f"{SERVICE}Heartbeat", self._fleet.hub))
                    self._heartbeat()
                else:
                    self._note(membership_pb2.HeartbeatResponse.FromString(content))

    def _note(self, answer: membership_pb2.HeartbeatResponse) -> None:
        fleet = self._fleet
        fleet.latencies_s.append(time.perf_counter() - self._sent_s)
        self._held = answer.head
        pause_s = answer.next_heartbeat_s if answer.HasField("next_heartbeat_s") else fleet.every_s
        fleet.pauses_s.append(pause_s)
        if not self._joined.done():
            self._joined.set_result(None)
            pause_s *= random.random()  # a fleet is spread out: it did not join at one moment
        self._loop.call_later(pause_s, self._heartbeat)

    def _heartbeat(self) -> None:
        if self._transport.is_closing():
            return
        self._sequence += 1
        self._sent_s = time.perf_counter()
        request = membership_pb2.HeartbeatRequest(
            sequence=self._sequence,
            sent_at_s=time.time(),
            held=self._held,
            clock_offset_s=0.001,
            waits_for="prompt lease: learner",
            instance=f"{id(self):016x}",
        )
        if self._sent_s - self._figures_sent_s >= FIGURES_EVERY_S:
            self._figures_sent_s = self._sent_s
            request.machine.CopyFrom(_MACHINE)
            if self._peer.role is Role.SAMPLER:
                request.sampler.CopyFrom(_SAMPLER)
        self._send(http2.message(_HEARTBEATS, request.SerializeToString()))

    def _join(self) -> membership_pb2.JoinRequest:
        is_learner = self._peer.role is Role.LEARNER
        return join_request(
            self._peer.run_id,
            self._peer.role,
            layout_digest=b"l" * 16,
            tokenizer_digest=b"t" * 16,
            learner_epoch=1 if is_learner else 0,
            vocabulary_size=100 if is_learner else 0,
            instance=f"{id(self):016x}",
            grader_digest=b"" if is_learner else b"g" * 16,
        )

    def _send(self, data: bytes) -> None:
        self._tls.write(data)
        self._flush()

    def _flush(self) -> None:
        if self._go.pending:
            self._transport.write(self._go.read())


async def main(run: Path, target: str, count: int, every_s: float) -> None:
    """Open the peers, then report at each line of standard input."""
    fleet = Fleet(run, target, every_s=every_s)
    await fleet.open(range(count))
    print(json.dumps({"joined": count}), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(fleet.report(), flush=True)


if __name__ == "__main__":
    descriptors.raise_limit()
    _, _run, _target, _count, _every = sys.argv
    uvloop.run(main(Path(_run), _target, int(_count), float(_every)))
