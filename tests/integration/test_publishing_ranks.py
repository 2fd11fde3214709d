"""A learner in two processes publishes what one alone would, byte for byte."""

import multiprocessing
from pathlib import Path

import numpy as np
import pytest

from bench.whole_versions import encode_version
from learner.training.master_words import MasterWords
from node.identity.signatures import SigningKey
from node.weights.assembly.encode import join
from node.weights.assembly.held import HeldPolicy
from node.weights.format.manifest import sign, signed_by
from node.weights.store.artifact_store import ArtifactStore
from support.ranks import LAYOUT, frames_of, names_of, publish_share, read_share, tensors_of

RANKS = 2
KEY = SigningKey.generate()


def whole_version(number: int) -> HeldPolicy:
    masters = MasterWords(tensors_of({span.name for span in LAYOUT.tensors}, version=number), LAYOUT)
    words = np.empty(LAYOUT.words, np.uint16)
    for frame, span in enumerate(LAYOUT.frames):
        masters.read(frame, words[span.slice])
    return HeldPolicy.of(number, words, layout=LAYOUT)


def test_two_processes_with_half_of_the_frames_each_make_the_artifact_that_one_makes(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(
        target=publish_share, args=(1, RANKS, str(tmp_path))
    )
    process.start()
    publish_share(0, RANKS, str(tmp_path))
    process.join(timeout=60)
    assert process.exitcode == 0

    shares = [share for rank in range(RANKS) for share in read_share(rank, tmp_path)]
    manifest = join(
        [coded for coded, _ in shares],
        version=1,
        base=whole_version(0).version,
        layout=LAYOUT,
        run_id="run",
        learner_epoch=1,
        published_at_s=5.0,
    )
    alone = encode_version(
        whole_version(1).words,
        version=1,
        base=whole_version(0),
        layout=LAYOUT,
        run_id="run",
        learner_epoch=1,
        published_at_s=5.0,
    )
    assert sign(manifest, KEY) == sign(alone.manifest, KEY)
    assert tuple(payload for _, payload in shares) == alone.payloads
    assert sum(map(len, alone.payloads)) > 0

    store = ArtifactStore(tmp_path / "store", public_key=KEY.public_key, run_id="run", retained_keyframes=1)
    with store.draft() as draft:
        for _, payload in shares:
            draft.append(payload)
        store.put_version(signed_by(manifest, KEY), draft)
    assert store.head() == whole_version(1).version


def test_a_share_that_is_missing_is_not_signed_over(tmp_path: Path) -> None:
    publish_share(0, RANKS, str(tmp_path))
    assert len(names_of(frames_of(0, ranks=RANKS))) < len(LAYOUT.tensors)
    with pytest.raises(ValueError, match=f"frames were coded, the layout has {len(LAYOUT.frames)}"):
        join(
            [coded for coded, _ in read_share(0, tmp_path)],
            version=1,
            base=whole_version(0).version,
            layout=LAYOUT,
            run_id="run",
            learner_epoch=1,
            published_at_s=5.0,
        )
