"""A history of versions made by coders: by one whose frames four ranks share, and by that of one process."""

import gc
import json
import threading
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from transformers import Qwen3Config, Qwen3ForCausalLM

from learner.masters.master_words import MasterWords, PolicyWords
from learner.masters.version_coder import VersionCoder
from learner.model.model import Policy, load_policy
from learner.publishing.starting_point import take_up
from learner.ranks.instruction_stream import InstructionStream
from learner.ranks.rank_group import RankGroup
from learner.ranks.words.dealt_words import DealtWords
from learner.ranks.words.frame_work import FrameWork
from learner.ranks.words.sharded_words import ShardedWords
from learner.sizing.mesh_sizes import MeshSizes
from node.errors import Reason, RefusedError
from node.identity.signatures import SigningKey
from node.system import durable
from node.values.policy import PolicyVersion
from node.weights.assembly.encode import join
from node.weights.assembly.merge import join_merged
from node.weights.assembly.public_base import PublicBase
from node.weights.assembly.stored import StoredVersions
from node.weights.format.digests import Words
from node.weights.format.layout import Layout, TensorSpec
from node.weights.format.manifest import Manifest, signed_by
from node.weights.store.artifact_files import Draft
from node.weights.store.artifact_store import ArtifactStore

FRAME_WORDS: Final = 16_384


@dataclass(frozen=True)
class Held:
    """Sizes, in bytes, of what the words of a history took on one rank."""

    words: int
    """Kept, as published and as being made."""
    peak: int
    """Most that Python and numpy had allocated at a time meanwhile."""
    whole: int
    """Both versions, of all frames."""


def model_of(layers: int) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        tie_word_embeddings=False,
        pad_token_id=2,
    )
    return Qwen3ForCausalLM(config)


def move(tensors: Mapping[str, Tensor], number: int) -> None:
    """Do what a step does: change some elements, whichever rank they are on."""
    with torch.no_grad():
        for tensor in tensors.values():
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            local.mul_(torch.where((local * 1e4).long() % (7 + number) == 0, 1.0 + 0.01 * number, 1.0))
        if number == LIVES[-1][-1] and "model.norm.weight" in tensors:  # the last stage has it
            tensors["model.norm.weight"].fill_(torch.inf)


def small_frames(policy: Policy) -> Layout:
    specs = [TensorSpec(span.name, span.shape, span.dtype.name) for span in policy.layout.tensors]
    return Layout.of(specs, frame_words=FRAME_WORDS)


@dataclass
class History:
    """A learner's store, and what a publisher does with it, one thing after the other."""

    store: ArtifactStore
    key: SigningKey
    words0: Words
    coder: VersionCoder
    head: PolicyVersion | None = None

    @classmethod
    def of(cls, directory: Path, words: PolicyWords, key: SigningKey, *, words0: Words) -> "History":
        store = ArtifactStore(
            directory / "published", public_key=key.public_key, run_id="run", retained_keyframes=2
        )
        history = cls(store, key, words0, words.coder(threads=2, spool=store.draft))
        history.head = take_up(history.coder, history.stored, store.head())
        return history

    @property
    def stored(self) -> StoredVersions:
        return StoredVersions(self.store, self.coder.layout, self.words0)

    def publish(self, number: int) -> None:
        with self.store.draft() as draft:
            coded = self.coder.code_masters(draft.append)
            self._put(draft, join(coded, version=number, base=self.head, **self._about))
        self.coder.keep()
        self.head = self.store.head()

    def add_keyframe(self) -> None:
        assert self.head is not None
        with self.store.draft() as draft:
            coded = self.coder.code_published(draft.append)
            self._put(draft, join(coded, version=self.head.number, base=None, **self._about))

    def merge(self, base: int, *, is_superseded: Callable[[], bool] = lambda: False) -> bool:
        assert self.head is not None
        with self.store.draft() as draft, self.stored.opened(base) as old:
            merged = self.coder.merge(old, draft.append, is_superseded=is_superseded)
            if merged is not None:
                about = self._about
                self._put(draft, join_merged(merged, head=self.head, base_version=base, **about))
        return merged is not None

    @property
    def _about(self) -> dict[str, Any]:
        return {
            "layout": self.coder.layout,
            "run_id": "run",
            "learner_epoch": 1,
            "published_at_s": 0.0,
        }

    def _put(self, draft: Draft, manifest: Manifest) -> None:
        self.store.put_version(signed_by(manifest, self.key), draft)


def full_disk(*, after: int) -> Callable[[bytes], None]:
    """Return a ``put`` that finds no room after some payloads."""
    taken: list[bytes] = []

    def put(payload: bytes) -> None:
        if len(taken) == after:
            raise RefusedError(Reason.DISK, "no room")
        taken.append(payload)

    return put


Step = Callable[[int], None]
LIVES: Final = ((1, 2, 3, 4), (5,))
"""The steps of a learner, and of the one that takes its place."""


def first_life(directory: Path, words: PolicyWords, key: SigningKey, step: Step) -> list[str]:
    """Publish deltas, a keyframe and merged deltas; then fail, on a full disk and for a newer version."""
    durable.make_directory(directory)
    base = PublicBase.keep(directory / "base.words", words.digests(), words.copy_frames, layout=words.layout)
    history, said = History.of(directory, words, key, words0=base.words), []
    for number in LIVES[0][:-1]:
        step(number)
        history.publish(number)
        if number == 2:
            history.add_keyframe()
    assert history.merge(1)
    assert history.merge(0)
    step(LIVES[0][-1])
    try:
        history.coder.code_masters(full_disk(after=9))
    except RefusedError as refused:
        said.append(str(refused))
    assert not history.merge(2, is_superseded=lambda: True)
    history.coder.close()
    return said


def second_life(directory: Path, words: PolicyWords, key: SigningKey, step: Step) -> list[str]:
    """Go on from the words published last, until a parameter is not finite."""
    words0 = np.memmap(directory / "base.words", np.uint16, "r")
    history = History.of(directory, words, key, words0=words0)
    assert history.head is not None
    assert history.head.number == LIVES[0][-2]
    history.publish(LIVES[0][-1])
    step(LIVES[1][-1])
    try:
        history.publish(LIVES[1][-1])
    except RefusedError as refused:
        return [str(refused)]
    return []


def publish_beside_one_process(
    directory: Path, mesh: tuple[int, ...], layers: int, is_measured: bool
) -> None:
    """Live the same lives on all ranks, and in one process on the first; leave both and what was said.

    Args:
        is_measured: count allocations, which slows them down, and leave what was held.
    """
    if is_measured:
        tracemalloc.start()  # and never stopped: a thread that is about to end may still use its tables
    group = RankGroup(MeshSizes(*mesh), device_type="cpu")
    shared = Policy(model_of(layers), ranks=group)
    layout, key, rank, said = small_frames(shared), SigningKey.generate(), dist.get_rank(), list[str]()
    stream, held = InstructionStream(), list[Held]()

    def step(number: int) -> None:
        dist.barrier()
        move(shared.tensors, number)
        dist.barrier()

    for live, steps in zip((first_life, second_life), LIVES, strict=True):
        masters = DealtWords(shared.tensors, layout, sizes=group.sizes, group=stream.exchanges)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        work = FrameWork(masters, threads=2)
        words = ShardedWords(work, stream, failures_named=group.failures_named)
        if rank == 0:
            said += live(directory / "shared", words, key, step)
            words.end()
        else:
            follower = threading.Thread(target=words.follow)
            follower.start()
            for number in steps:
                step(number)
            follower.join()
        _, peak = tracemalloc.get_traced_memory()
        held.append(Held(work.words.size_bytes, peak - before, 4 * layout.words))
        del words, work, masters
    if is_measured:
        (directory / f"held-{rank}.json").write_text(json.dumps([asdict(one) for one in held]))
    if rank == 0:
        alone = Policy(model_of(layers))
        words_alone = MasterWords(alone.tensors, layout)
        for live in (first_life, second_life):
            said += live(directory / "alone", words_alone, key, partial(move, alone.tensors))
        (directory / "said.json").write_text(json.dumps(said))
    dist.barrier()


def read_own_slices(directory: Path) -> None:
    """Load a saved model as one of four shards; leave how many elements this rank read of the files."""
    elements: list[int] = []
    commit = DefaultLoadPlanner.commit_tensor

    def count(self: DefaultLoadPlanner, read_item: ReadItem, tensor: Tensor) -> None:
        elements.append(read_item.lengths.numel())
        commit(self, read_item, tensor)

    group = RankGroup(MeshSizes(1, 4, 1), device_type="cpu")
    with mock.patch.object(DefaultLoadPlanner, "commit_tensor", count):
        policy = load_policy(directory / "model", device="cpu", ranks=group)
    whole = sum(tensor.numel() for tensor in policy.tensors.values())
    (directory / f"read-{group.rank}.json").write_text(json.dumps([sum(elements), whole]))
