"""A coordinator of the demo damages what it serves first, and nothing after that."""

from pathlib import Path

import pytest

from deploy.demo import damaging_node
from deploy.demo.damaging_node import damage_first, damage_what_is_served
from node.serving.policy_servicer import PolicyServicer
from node.values.policy import ArtifactKey
from support.policy_hub import Registry
from support.weights import Learner


def test_the_first_messages_are_a_bit_off_and_the_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PolicyServicer, "read", PolicyServicer.read)
    damage_what_is_served(damage_first(2))
    learner = Learner()
    store = learner.store(tmp_path)
    learner.put(store, (1, 0))
    servicer, payloads = PolicyServicer(store, metrics=Registry().metrics), learner.encode(1, 0).payloads
    read = [servicer.read(ArtifactKey(1, 0), [frame], verifies=False) for frame in (0, 1, 2)]
    assert [got == payload for got, payload in zip(read, payloads, strict=False)] == [False, False, True]


def test_a_node_is_run_with_as_many_faults_as_its_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PolicyServicer, "read", PolicyServicer.read)
    monkeypatch.setenv(damaging_node.VARIABLE, "1")
    monkeypatch.setattr(damaging_node, "main", lambda: 7)
    assert damaging_node.run() == 7
