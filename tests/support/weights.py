"""Small models' weights, as words, and the artifacts an honest learner makes of them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.held_policy import HeldPolicy
from bench.whole_versions import EncodedVersion, encode_version
from node.identity.signatures import SigningKey
from node.values.policy import ArtifactKey
from node.weights.format.digests import Words
from node.weights.format.layout import Layout, TensorSpec
from node.weights.format.manifest import Codec, FrameRecord, Manifest, sign
from node.weights.store.artifact_store import ArtifactStore

RUN_ID = "example"
SPECS = (
    TensorSpec("embed", (100, 40)),
    TensorSpec("bias", (300,)),
    TensorSpec("head", (600,)),
    TensorSpec("z", ()),
)
LAYOUT = Layout.of(SPECS, frame_words=1024)
"""Five frames: bias and embed begin in the first, embed fills three more, and ends in that of head and z."""


def put_version(store: ArtifactStore, signed: bytes, payloads: Sequence[bytes]) -> None:
    """Store an artifact as the process that made it does."""
    with store.draft() as draft:
        for payload in payloads:
            draft.append(payload)
        store.put_version(store.offer_signed(signed)[0], draft)


def put_words(
    store: ArtifactStore,
    key: SigningKey,
    words: Words,
    *,
    version: int,
    base: HeldPolicy | None,
    layout: Layout,
) -> None:
    """Store a version of the run ``run`` as a delta from ``base``; None: as a keyframe."""
    encoded = encode_version(
        words,
        version=version,
        base=base,
        layout=layout,
        run_id="run",
        learner_epoch=1,
        published_at_s=0.0,
    )
    put_version(store, sign(encoded.manifest, key), encoded.payloads)


def manifest_of_sizes(sizes: Sequence[int], *, version: int = 1, base_version: int = 0) -> Manifest:
    """Return a manifest of which only the sizes of the payloads matter."""
    frames = tuple(FrameRecord(Codec.RAW, size, 0, bytes(16)) for size in sizes)
    return Manifest("example", 1, bytes(16), version, bytes(16), base_version, bytes(16), 0.0, frames)


def random_words(seed: int, *, layout: Layout = LAYOUT) -> Words:
    """Return weights as a model has them: normal, standard deviation 0.02, cut to bf16."""
    values = np.random.default_rng(seed).normal(0, 0.02, layout.words).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def drifted(words: Words, seed: int, *, share: float = 0.02) -> Words:
    """Return the weights after a step: a share of the words moved by a unit or two."""
    random = np.random.default_rng(seed)
    moved = np.flatnonzero(random.random(words.size) < share)
    new = words.copy()
    new[moved] += random.choice([-2, -1, 1, 2], moved.size).astype(np.int16).astype(np.uint16)
    return new


@dataclass
class Learner:
    """Makes a policy version after the other and remembers them all."""

    layout: Layout = LAYOUT
    epoch: int = 1
    run_id: str = RUN_ID
    key: SigningKey = field(default_factory=SigningKey.generate)
    versions: dict[int, HeldPolicy] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.versions.setdefault(0, HeldPolicy.of(0, random_words(0, layout=self.layout), layout=self.layout))

    def words(self, version: int) -> Words:
        """Return version ``version``, which is always the same drift from the one before."""
        for number in range(1, version + 1):
            if number not in self.versions:
                words = drifted(self.versions[number - 1].words, number)
                self.versions[number] = HeldPolicy.of(number, words, layout=self.layout)
        return self.versions[version].words

    def encode(self, version: int, base: int | None) -> EncodedVersion:
        """Return the artifact ``base`` -> ``version``; None: a keyframe."""
        words = self.words(version)
        return encode_version(
            words,
            version=version,
            base=None if base is None else self.versions[base],
            layout=self.layout,
            run_id=self.run_id,
            learner_epoch=self.epoch,
            published_at_s=1000.0 + version,
        )

    def signed(self, version: int, base: int | None) -> tuple[bytes, tuple[bytes, ...]]:
        """Return the signed manifest and the payloads of such an artifact."""
        encoded = self.encode(version, base)
        return sign(encoded.manifest, self.key), encoded.payloads

    def put(self, store: ArtifactStore, *artifacts: tuple[int, int | None]) -> None:
        """Store artifacts whole."""
        for version, base in artifacts:
            put_version(store, *self.signed(version, base))

    def store(
        self,
        directory: Path,
        *,
        retained_keyframes: int = 2,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> ArtifactStore:
        """Open a store that believes this learner."""
        return ArtifactStore(
            directory,
            public_key=self.key.public_key,
            run_id=self.run_id,
            retained_keyframes=retained_keyframes,
            monotonic=monotonic,
        )


def keys(store: ArtifactStore) -> list[tuple[int, int]]:
    """Return what a store announces, as (version, base version)."""
    announcement = store.announcement()
    return (
        [] if announcement is None else [(a.key.version, a.key.base_version) for a in announcement.artifacts]
    )


def frames_file(directory: Path, key: ArtifactKey, *, room: str = "complete") -> Path:
    """Return where a store keeps an artifact's payloads."""
    return directory / room / f"{key.version}-{'key' if key.is_keyframe else key.base_version}" / "frames"


def flip_bit(path: Path, byte: int) -> None:
    """Damage a file as a tired disk would."""
    content = bytearray(path.read_bytes())
    content[byte] ^= 4
    path.write_bytes(content)


def offsets(payloads: Sequence[bytes]) -> list[int]:
    """Return where each payload starts in the frames file."""
    return [sum(map(len, payloads[:i])) for i in range(len(payloads))]
