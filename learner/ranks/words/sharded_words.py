"""Versions whose frames are shared out over ranks: each has, keeps and codes the words of its own.

    first rank --instruction--> every rank, round after round: fills its next frames, which its threads code
        ^                                                                                   |
        '------- records, digests, payloads of the round before: by way of a file a rank, to the draft

A rank keeps the words of its own frames twice, as published and as being made; beyond them, two rounds under
way bound its memory. The first rank collects coded payloads and digests. It sees words only when they go to
its disk, as the public base model does, one frame at a time.

Old versions are rebuilt by the ranks that need them. Only the first rank is sure to see the store, so it
sends the payloads, and the words that the first artifact starts from.

The first rank opens each round, so that it can give up between two: its disk may be full, or a newer version
may be waiting.
"""

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from itertools import accumulate, pairwise
from typing import Final

import numpy as np
import torch
import torch.distributed as dist

from learner.masters.master_words import Spool
from learner.masters.version_coder import Put
from learner.model.rank_exchanges import Instruction
from learner.ranks.instruction_stream import InstructionStream
from learner.ranks.words.frame_work import (
    HEADER_BYTES,
    OF_STORE,
    FrameResult,
    FrameWork,
    Round,
    Steps,
    payload_sizes,
    results_of,
)
from node.weights.assembly.encode import CodedFrame
from node.weights.assembly.merge import MergedFrame
from node.weights.assembly.public_base import TakeWords
from node.weights.assembly.stored import StoredVersion
from node.weights.format.layout import Layout
from node.weights.format.manifest import SIGNATURE_BYTES, parse

_STOP, _GO = 0, 1

Results = Generator[tuple[int, FrameResult], None, None]
"""Frames and what became of them."""


class ShardedWords:
    """The words of a policy that several ranks have, seen from one of them.

    On the first rank these are ``PolicyWords`` and a ``VersionCoder``; the others ``follow``.
    """

    def __init__(
        self,
        work: FrameWork,
        stream: InstructionStream,
        *,
        failures_named: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Do this rank's ``work``, as instructions in ``stream`` say.

        Args:
            failures_named: raises what other ranks' failures lead to as an error that names them.
        """
        self.layout: Final[Layout] = work.layout
        self._owners = [work.owner(frame) for frame in range(len(work.layout.frames))]
        self._work = work
        self._stream = stream
        self._failures_named = failures_named
        self._lock = threading.Lock()
        self._spool: Spool | None = None

    @property
    def has_published(self) -> bool:
        """Whether there is a version to code against."""
        return self._work.words.has_published

    def coder(self, *, threads: int, spool: Spool) -> "ShardedWords":
        """Return itself: how many threads code was said when it was made, on every rank."""
        self._spool = spool
        return self

    def digests(self) -> list[int]:
        """Return ``words_digest`` of every frame of the masters."""
        return self._digests(self._results("digest"))

    def copy_frames(self, take: TakeWords) -> None:
        """Hand over the words of every frame of the masters, one at a time, in order."""
        with closing(self._results("copy")) as results:
            for frame, result in results:
                take(frame, np.frombuffer(result.payload, np.uint16))

    def code_masters(self, put: Put) -> Sequence[CodedFrame]:
        """See ``VersionCoder``."""
        return [result.coded for result in self._in_order(self._results("code"), put)]

    def code_published(self, put: Put) -> Sequence[CodedFrame]:
        """See ``VersionCoder``."""
        return [result.coded for result in self._in_order(self._results("keyframe"), put)]

    def keep(self) -> None:
        """See ``VersionCoder``."""
        with self._lock, self._failures_named():
            self._stream.send(Instruction("keep", {}))
            self._work.words.keep()

    def merge(
        self, old: StoredVersion, put: Put, *, is_superseded: Callable[[], bool]
    ) -> Sequence[MergedFrame] | None:
        """See ``VersionCoder``."""
        results = self._in_order(self._results("merge", old), put, is_superseded=is_superseded)
        return [result.merged for result in results] or None

    def rebuild(self, stored: StoredVersion) -> list[int]:
        """See ``VersionCoder``."""
        return self._digests(self._results("rebuild", stored))

    def close(self) -> None:
        """See ``VersionCoder``."""
        self._work.close()

    def end(self, *, limit_s: float | None = None) -> None:
        """Tell the other ranks that nothing is asked for any more. First rank; ``limit_s``: see ``send``."""
        self._stream.send(Instruction("end", {}), limit_s=limit_s)

    def follow(self) -> None:
        """Do what the first rank asks for, until it needs no more. Another rank."""
        while (instruction := self._stream.receive()).name != "end":
            if instruction.name == "keep":
                self._work.words.keep()
            else:
                self._take_part(instruction)

    def _take_part(self, instruction: Instruction) -> None:
        manifests, before = [parse(signed[:-SIGNATURE_BYTES]) for signed in instruction.blobs], Round()
        for frames in self._work.rounds(instruction.name):
            if self._hear() == _STOP:
                before.wait()
                return
            own = self._work.own(frames)
            of_store = own if instruction.name in OF_STORE else ()
            steps = {frame: self._receive_steps(len(manifests)) for frame in of_store}
            begun = self._work.begin(instruction.name, frames, manifests, steps)
            self._tell(before)
            before = begun
        if self._hear() == _GO:
            self._tell(before)
        before.wait()

    def _results(self, name: str, stored: StoredVersion | None = None) -> Results:
        """Tell all ranks to do some work on all frames; yield the results, each rank's in ascending order.

        Raises:
            RefusedError: a rank raised it for a frame, or the store for a payload.
            RankLostError: a rank is gone.
        """
        manifests = () if stored is None else stored.manifests
        with self._lock, self._failures_named():
            self._stream.send(Instruction(name, {}, [manifest.signed for manifest in manifests]))
            under_way, is_told = [Round()], False
            try:
                for frames in self._work.rounds(name):
                    steps = {} if stored is None else {frame: _steps(stored, frame) for frame in frames}
                    self._say(_GO)
                    self._deal(frames, steps)
                    under_way.append(self._work.begin(name, frames, manifests, steps))
                    yield from self._heard(under_way.pop(0))
                self._say(_GO)
                is_told = True
                yield from self._heard(under_way[0])
            finally:
                if not is_told:
                    with suppress(RuntimeError):
                        self._say(_STOP)
                for one in under_way:
                    one.wait()

    def _heard(self, one: Round) -> Results:
        """Yield the results of a round. However little of them is wanted, no rank is left waiting."""
        answers = self._answers(one)
        refused: FrameResult | None = None
        try:
            for frame, result in answers:
                if result.is_refused:
                    refused = refused or result
                elif refused is None:
                    yield frame, result
        finally:
            for _ in answers:
                pass
        if refused is not None:
            refused.raise_refusal()

    def _answers(self, one: Round) -> Results:
        for rank in range(dist.get_world_size(self._stream.exchanges)):
            frames = self._work.own(one.frames, rank=rank)
            if rank == self._work.rank:
                yield from zip(frames, one.results(), strict=True)
            elif frames:
                headers = self._receive(HEADER_BYTES * len(frames), rank)
                sizes = payload_sizes(headers)
                payloads = self._receive(sum(sizes), rank)
                ends = [0, *accumulate(sizes)]
                results = results_of(headers, [payloads[start:end] for start, end in pairwise(ends)])
                yield from zip(frames, results, strict=True)

    def _tell(self, one: Round) -> None:
        """Tell the first rank what became of this one's frames."""
        if results := one.results():
            self._send(b"".join(result.header() for result in results), 0)
            self._send(b"".join(result.payload for result in results), 0)

    def _digests(self, results: Results) -> list[int]:
        digests = {frame: result.coded.digest for frame, result in results}
        return [digests[frame] for frame in range(len(self.layout.frames))]

    def _in_order(
        self, results: Results, put: Put, *, is_superseded: Callable[[], bool] = lambda: False
    ) -> list[FrameResult]:
        """Put the payloads in the order of the layout, and return all results; none: superseded.

        They come in another order, and may take as much room as all words: so each rank's go to a file first.
        """
        if self._spool is None:
            raise ValueError("nothing is coded before coder() says where payloads go")
        owners, found = self._owners, dict[int, FrameResult]()
        with ExitStack() as stack:
            spools = {rank: stack.enter_context(self._spool()) for rank in sorted(set(owners))}
            stack.enter_context(closing(results))
            for frame, result in results:
                spools[owners[frame]].append(result.payload)
                found[frame] = result.without_payload()
                if is_superseded():
                    return []
            files = {rank: stack.enter_context(spool.reopen()) for rank, spool in spools.items()}
            for frame, owner in enumerate(owners):
                put(files[owner].read(found[frame].coded.record.payload_bytes))
        return [found[frame] for frame in range(len(owners))]

    def _deal(self, frames: Sequence[int], steps: dict[int, Steps]) -> None:
        """Send the way to an old version's frames to the ranks that have them."""
        for frame in frames if steps else ():
            if (owner := self._owners[frame]) != self._work.rank:
                start, payloads = steps[frame].start, steps[frame].payloads
                parts = [b"" if start is None else start.tobytes(), *payloads]
                self._send(np.array([len(part) for part in parts], "<i8").tobytes(), owner)
                self._send(b"".join(parts), owner)

    def _receive_steps(self, artifacts: int) -> Steps:
        sizes = np.frombuffer(self._receive(8 * (1 + artifacts), 0), "<i8").tolist()
        data, ends = self._receive(sum(sizes), 0), [0, *accumulate(sizes)]
        start, *payloads = (data[start:end] for start, end in pairwise(ends))
        return Steps(np.frombuffer(start, np.uint16) if start else None, payloads)

    def _say(self, word: int) -> None:
        dist.broadcast(torch.tensor([word]), src=0, group=self._stream.exchanges)

    def _hear(self) -> int:
        word = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(word, src=0, group=self._stream.exchanges)
        return int(word)

    def _send(self, data: bytes, rank: int) -> None:
        if data:
            dist.send(
                torch.from_numpy(np.frombuffer(bytearray(data), np.uint8)), rank, self._stream.exchanges
            )

    def _receive(self, size_bytes: int, rank: int) -> bytes:
        data = np.empty(size_bytes, np.uint8)
        if size_bytes:
            dist.recv(torch.from_numpy(data), rank, self._stream.exchanges)
        return data.tobytes()


def _steps(stored: StoredVersion, frame: int) -> Steps:
    return Steps(stored.start(frame), stored.payloads(frame))
