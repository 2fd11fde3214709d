"""A store that is killed anywhere, damaged anywhere and offered anything keeps its promises."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from node.errors import Reason, RefusedError
from node.weights.planning.cheapest_chain import plan_fresh
from support.present import present
from support.weights import Learner, flip_bit

LEARNER = Learner()
SIGNED = {
    (version, base): LEARNER.signed(version, base)
    for version in range(1, 7)
    for base in (None, *range(max(0, version - 2), version))
}


@contextmanager
def refusals_of(reason: Reason) -> Iterator[list[RefusedError]]:
    """Let the body be refused for one reason, and say whether it was."""
    refused: list[RefusedError] = []
    try:
        yield refused
    except RefusedError as error:
        if error.reason is not reason:
            raise
        refused.append(error)


class StoreMachine(RuleBasedStateMachine):
    """Rules are what happens to a hub's disk; invariants are what its peers rely on."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.head = -1
        self.restart()

    def teardown(self) -> None:
        shutil.rmtree(self.directory)

    @rule()
    def restart(self) -> None:
        self.store = LEARNER.store(self.directory)

    @rule(which=st.sampled_from(sorted(SIGNED, key=str)), frames=st.sets(st.integers(0, 4)))
    def upload(self, which: tuple[int, int | None], frames: set[int]) -> None:
        signed, payloads = SIGNED[which]
        with refusals_of(Reason.ROLLBACK):
            manifest, missing = self.store.offer_signed(signed)
            for frame in frames.intersection(missing):
                self.store.write_frame(manifest.key, frame, payloads[frame])

    @precondition(lambda self: any(self.directory.glob("*/*/frames")))
    @rule(data=st.data())
    def rot(self, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(sorted(self.directory.glob("*/*/frames"))))
        if size := path.stat().st_size:
            flip_bit(path, data.draw(st.integers(0, size - 1)))

    @precondition(lambda self: any(self.directory.glob("complete/*")))
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        shutil.rmtree(data.draw(st.sampled_from(sorted(self.directory.glob("complete/*")))))
        self.restart()

    @invariant()
    def the_head_never_goes_back_and_is_the_learners(self) -> None:
        announcement = self.store.announcement()
        if announcement is not None:
            assert announcement.head.number >= self.head
            assert announcement.head == LEARNER.versions[announcement.head.number].version
            self.head = announcement.head.number
            for version in {artifact.key.version for artifact in announcement.artifacts}:
                assert version <= self.head or plan_fresh(version, announcement.artifacts) is None
        else:
            assert self.head == -1

    @invariant()
    def what_is_served_is_what_was_signed(self) -> None:
        announcement = self.store.announcement()
        for artifact in () if announcement is None else announcement.artifacts:
            key = artifact.key
            payloads = SIGNED[key.version, None if key.is_keyframe else key.base_version][1]
            for frame, payload in enumerate(payloads):
                with refusals_of(Reason.DAMAGED) as refused:
                    assert self.store.read_payload(key, frame) == payload
                if refused:
                    announcement = present(self.store.announcement())
                    assert artifact not in announcement.artifacts


StoreMachine.TestCase.settings = settings(max_examples=15, stateful_step_count=20)
test_a_hubs_disk_keeps_its_promises = StoreMachine.TestCase
