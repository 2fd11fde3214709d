"""Hostile bytes at every door of the wire: ``make fuzz N=1000000``.

Good messages, and hostile ones that are kept, are damaged at random from a seed and brought to the function
that reads them. A door refuses with RefusedError. Anything else that it raises is a crash, and what it takes
for authentic that nobody made is accepted; either is kept as a file of ``tests/fuzz/corpus`` and replayed.
"""

import argparse
import contextlib
import hashlib
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import zstandard
from google.protobuf.message import DecodeError, Message

from heterorl.v1 import membership_pb2, policy_pb2, rollout_pb2
from node.enrolment.authority import read_signing_request, signing_request
from node.enrolment.tokens import Token, issue_token
from node.errors import Reason, RefusedError
from node.identity.certificates import read_curve_key
from node.identity.revocation import Revocations
from node.rpc.strangers.client_hello import server_name_in
from node.values.groups.failure import FailedLease, Failure
from node.values.groups.rollout import LeaseGrant
from node.values.groups.verdict import GroupVerdict
from node.values.groups.well_formed import check_group
from node.values.peer_figures import MachineFigures, SamplerFigures
from node.values.policy import Announcement, ArtifactKey
from node.values.roles import Role
from node.values.run import PeerQuery, RunSettings, RunStatus, StepRecord, StepReport, Teaching
from node.weights.assembly.apply import make_frame
from node.weights.codec.frame_codec import decode_frame, encode_planes, encode_step_planes
from node.weights.format.dtypes import DTYPES
from node.weights.format.manifest import Codec, parse, verify_signed
from node.wire.mapping import from_wire, optional_from_wire
from node.wire.members import base_model_from_wire, check_owners
from node.wire.rollouts import encoded_from_wire, group_from_wire, group_to_wire, submission_to_wire
from support.client_hello import client_hello
from support.groups import make_group
from support.identity import NOW_S, make_run
from support.weights import LAYOUT, Learner, drifted

CORPUS: Final = Path(__file__).parents[1] / "fuzz/corpus"
FULL_FRAME: Final = LAYOUT.frames[0].words.bit_length() - 1
"""Power of two that is a whole frame's words."""

_FEW: Final = 10
"""Power of two that is a small frame's words; the decoder takes them for float32."""

_NOT_USUAL: Final[dict[str, Any]] = {"version": 2, "reason": Failure.PROMPT_FAILED.value, "node_ids": "a"}
"""Fields of good messages that not any value of their type is good for."""

GUARD: Final = 64
"""Words beside those that a frame may write."""

_VALUES: Final[Sequence[tuple[type[Message], type[Any]]]] = (
    (membership_pb2.StepReport, StepReport),
    (membership_pb2.Teaching, Teaching),
    (membership_pb2.PeerQuery, PeerQuery),
    (membership_pb2.JoinResponse, RunSettings),
    (membership_pb2.Revocations, Revocations),
    (membership_pb2.GetStatusResponse, RunStatus),
    (membership_pb2.GroupVerdict, GroupVerdict),
    (policy_pb2.ArtifactKey, ArtifactKey),
    (policy_pb2.WatchVersionsResponse, Announcement),
    (rollout_pb2.LeasePromptsResponse, LeaseGrant),
    (rollout_pb2.FailedLease, FailedLease),
    (rollout_pb2.StepRecord, StepRecord),
)
"""Messages of peers and hubs, and what they become."""


@dataclass(frozen=True, slots=True)
class Door:
    """A function that reads bytes from outside; ``enter`` returns whether it took them for authentic."""

    name: str
    good: tuple[bytes, ...]
    enter: Callable[[bytes], bool]


def doors(directory: Path) -> list[Door]:
    """Return the doors of a run that is made in ``directory``."""
    made = make_run(directory, now=NOW_S)
    learner = Learner()
    artifacts = [learner.signed(2, 1), learner.signed(2, None)]
    manifests = [
        verify_signed(signed, public_key=learner.key.public_key, run_id=learner.run_id)
        for signed, _ in artifacts
    ]
    base = learner.versions[1].words
    frames = [
        bytes([number, frame]) + payload
        for number, (_, payloads) in enumerate(artifacts)
        for frame, payload in enumerate(payloads)
    ]
    coded = [
        bytes([FULL_FRAME, list(Codec).index(record.codec)]) + payload
        for one, (_, payloads) in zip(manifests, artifacts, strict=True)
        for record, payload in zip(one.frames[:-1], payloads, strict=False)
    ]
    few = np.full(1 << _FEW, 0xABCD, np.uint16)
    moved = drifted(few, 8, share=0.05)
    planes = {
        Codec.PLANES: encode_planes(moved, element_bytes=4),
        Codec.STEP_PLANES: encode_step_planes(moved, base=few, element_bytes=4),
    }
    coded += [bytes([_FEW, list(Codec).index(codec)]) + payload for codec, payload in planes.items()]
    group = group_to_wire(make_group("3.1", size=3))
    submission = submission_to_wire(group)
    token = issue_token(
        made.authority, role=Role.SAMPLER, node_id="sampler-1", address="localhost:7701", now=NOW_S
    )

    def manifest(data: bytes) -> bool:
        verify_signed(data, public_key=learner.key.public_key, run_id=learner.run_id)
        return True

    def signed(data: bytes) -> bool:
        """Read what a learner has signed: it can be written in one way only."""
        assert parse(data).to_bytes() == data, "it is read as another manifest"
        return False

    def payload(data: bytes) -> bool:
        number, frame = (data + b"\0\0")[:2]
        artifact, frame = number % len(artifacts), frame % len(LAYOUT.frames)
        span = LAYOUT.frames[frame]
        out = np.empty(span.words, np.uint16)
        make_frame(frame, manifests[artifact], data[2:], base=base[span.slice], out=out, dtype=span.dtype)
        return data[2:] != artifacts[artifact][1][frame]

    def decoder(data: bytes) -> bool:
        """Read what has the right digest: a learner's own, or of a broken machine of its."""
        number, codec = (data + b"\0\0")[:2]
        words = 1 << number % 12
        room = np.full(words + 2 * GUARD, 0xABCD, np.uint16)
        dtype = DTYPES[("bfloat16", "float32", "int8")[number % 3]]
        codecs = list(Codec)
        out, base = room[GUARD:-GUARD], np.full(words, 0xABCD, np.uint16)
        try:
            decode_frame(codecs[codec % len(codecs)], data[2:], base=base, out=out, dtype=dtype)
        finally:
            assert (base == 0xABCD).all(), "it wrote into its base"
            assert (room[:GUARD] == 0xABCD).all(), "it wrote before its frame"
            assert (room[-GUARD:] == 0xABCD).all(), "it wrote behind its frame"
        return False

    def hello(data: bytes) -> bool:
        try:
            server_name_in(data)
        except ValueError as error:
            raise RefusedError(Reason.MALFORMED, str(error)) from error
        return False

    def contents(data: bytes) -> bool:
        """Read what a sampler submits: a member that is dishonest."""
        message = rollout_pb2.SubmitRolloutsRequest.FromString(data)
        check_group(group_from_wire(encoded_from_wire(message.group)), vocabulary_size=1 << 16)
        return False

    def admission(data: bytes) -> bool:
        return Token.parse(data.decode(errors="replace")).model_dump() != Token.parse(token).model_dump()

    def request(data: bytes) -> bool:
        read_signing_request(data)
        return False

    def join(data: bytes) -> bool:
        message = membership_pb2.JoinRequest.FromString(data)
        _check_all_owners(message)
        base_model_from_wire(message)
        return False

    def heartbeat(data: bytes) -> bool:
        message = membership_pb2.HeartbeatRequest.FromString(data)
        _check_all_owners(message)
        optional_from_wire(MachineFigures, message, "machine")
        optional_from_wire(SamplerFigures, message, "sampler")
        return False

    def reads(message_type: type[Message], value_type: type[Any]) -> Callable[[bytes], bool]:
        def read(data: bytes) -> bool:
            from_wire(value_type, message_type.FromString(data))
            return False

        return read

    return [
        Door("manifest", tuple(signed for signed, _ in artifacts), manifest),
        Door("signed-manifest", tuple(one.to_bytes() for one in manifests), signed),
        Door("payload", tuple(frames), payload),
        Door("decoder", (*coded, *_bombs()), decoder),
        Door("client-hello", (client_hello("relay.example.heterorl"),), hello),
        Door("group", (submission.SerializeToString(),), contents),
        Door("token", (token.encode(),), admission),
        Door("signing-request", (signing_request(read_curve_key(made.sampler.key_pem)),), request),
        Door("join", (_filled(membership_pb2.JoinRequest()),), join),
        Door("heartbeat", (_filled(membership_pb2.HeartbeatRequest()),), heartbeat),
        *(Door(kind.__name__, _good(kind), reads(kind, value)) for kind, value in _VALUES),
    ]


def _check_all_owners(message: Message) -> None:
    for role in (Role.SAMPLER, Role.LEARNER, Role.RELAY):
        with contextlib.suppress(RefusedError):
            check_owners(message, role)


def _bombs() -> list[bytes]:
    """Return payloads that would become far more than a frame."""
    zeros = zstandard.compress(bytes(1 << 26))
    return [bytes([number, codec]) + zeros for number in range(3) for codec in range(len(Codec))]


def _good(kind: type[Any]) -> tuple[bytes, ...]:
    """Return messages with something in each field; a step's record has groups or what it restores."""
    filled = _filled(kind())
    if kind is not rollout_pb2.StepRecord:
        return (filled,)
    step = kind.FromString(filled)
    step.ClearField("restored_version")
    return step.SerializeToString(), kind(version=2, restored_version=1).SerializeToString()


def _filled(message: Any, depth: int = 3) -> bytes:
    """Return an encoded message with something in each field, which a sampler may set or not."""
    for field in message.DESCRIPTOR.fields:
        is_many = field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED
        if field.message_type is not None:
            if field.message_type.GetOptions().map_entry or not depth:
                continue
            part = getattr(message, field.name)
            inner = part.add() if is_many else part
            inner.SetInParent() if not is_many else None
            inner.MergeFromString(_filled(type(inner)(), depth - 1))
            continue
        kinds: dict[int, Any] = {field.CPPTYPE_STRING: "1.1", field.CPPTYPE_BOOL: True}
        usual = b"0" * 16 if field.type == field.TYPE_BYTES else kinds.get(field.cpp_type, 1)
        value = _NOT_USUAL.get(field.name, usual)
        if is_many:
            getattr(message, field.name).append(value)
        else:
            setattr(message, field.name, value)
    return bytes(message.SerializeToString())


def damaged(good: Sequence[bytes], chance: random.Random) -> bytes:
    """Return one of the messages, or a part of two, with one to four faults."""
    data = bytearray(chance.choice(good))
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        here = chance.randrange(len(data) + 1)
        there = min(len(data), here + chance.choice((1, 2, 4, 8, 64)))
        match chance.randrange(8):
            case 0 if here < len(data):
                data[here] ^= 1 << chance.randrange(8)
            case 1:
                data[here:there] = chance.randbytes(there - here)
            case 2:
                del data[here:there]
            case 3:
                data[here:here] = data[here:there] * chance.choice((1, 2, 100))
            case 4:
                data[here:there] = chance.choice((b"\xff", b"\0", b"\x7f", b"\x80")) * (there - here)
            case 5:  # a length, or a number, at the end of its range
                data[here:here] = chance.choice(
                    (b"\xff" * 9 + b"\1", b"\xff\xff\xff\xff\x0f", b"\xff\xff\xff\x7f")
                )
            case 6:
                other = chance.choice(good)
                data[here:] = other[chance.randrange(len(other) + 1) :]
            case _:
                del data[here:]
    return bytes(data)


def fate(door: Door, data: bytes) -> str:
    """Return what became of bytes that nobody made: refused, read, accepted, or a crash."""
    try:
        return "accepted" if door.enter(data) else "read"
    except (RefusedError, DecodeError):
        return "refused"
    except Exception as error:
        return f"crash: {type(error).__name__}: {error}"


def kept(door: Door) -> list[bytes]:
    """Return the hostile bytes that are kept for a door."""
    return [file.read_bytes() for file in sorted((CORPUS / door.name).glob("*"))]


def fuzz(inputs: int, seed: int, directory: Path) -> tuple[Counter[str], list[tuple[str, bytes, str]]]:
    """Bring so many damaged messages to all doors in turn.

    Returns:
        How many were refused, and read as values; and each that was accepted or crashed, with its door.
    """
    chance = random.Random(seed)
    every = [(door, (*door.good, *kept(door))) for door in doors(directory)]
    counts: Counter[str] = Counter()
    faults: list[tuple[str, bytes, str]] = []
    for number in range(inputs):
        door, good = every[number % len(every)]
        data = damaged(good, chance)
        if data in door.good:
            continue
        end = fate(door, data)
        if end in ("refused", "read"):
            counts[end] += 1
        else:
            faults.append((door.name, data, end))
    return counts, faults


def main() -> None:
    """Fuzz as the command line says; exit 1 if something was accepted, crashed, or memory grew."""
    parser = argparse.ArgumentParser(description="Bring hostile bytes to every door of the wire.")
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began_s = time.process_time()
    total: Counter[str] = Counter()
    faults: list[tuple[str, bytes, str]] = []
    peaks_kib = []
    parts = 10
    for part in range(parts):
        with tempfile.TemporaryDirectory() as directory:
            counts, found = fuzz(options.inputs // parts, options.seed * parts + part, Path(directory))
        total += counts
        faults += found
        peaks_kib.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        print(
            f"{part + 1}/{parts}: {dict(total)}, {len(faults)} faults, peak {peaks_kib[-1] >> 10} MiB",
            flush=True,
        )
    for name, data, end in faults:
        file = CORPUS / name / hashlib.sha256(data).hexdigest()[:16]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        print(f"{name}: {end[:200]}; kept as {file}")
    grown_kib = peaks_kib[-1] - peaks_kib[1]
    used_s = time.process_time() - began_s
    print(f"{used_s:.0f} s of CPU; memory grew by {grown_kib >> 10} MiB after the second part")
    sys.exit(bool(faults) or grown_kib > 16 << 10)


if __name__ == "__main__":
    main()
