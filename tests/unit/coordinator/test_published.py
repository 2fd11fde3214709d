"""Which versions a group may name, with a real store."""

from pathlib import Path

from node.coordinator.published import Published
from node.coordinator.work.version_log import Announced
from support.coordinator import make_accounts
from support.weights import Learner


def test_before_the_first_version_only_the_base_model_may_be_named(tmp_path: Path) -> None:
    published = Published(Learner().store(tmp_path), make_accounts())
    assert published.head() is None
    assert [published.has(number) for number in (0, 1)] == [True, False]
    assert published.unlogged() == ()


def test_a_version_may_be_named_from_its_announcement_on(tmp_path: Path) -> None:
    learner = Learner()
    store = learner.store(tmp_path)
    published = Published(store, make_accounts())
    learner.put(store, (1, None), (3, 1))
    assert published.head() == learner.versions[3].version
    assert [published.has(number) for number in (1, 2, 3)] == [True, False, True]


def test_a_version_the_store_has_forgotten_may_still_be_named(tmp_path: Path) -> None:
    learner = Learner()
    store = learner.store(tmp_path, retained_keyframes=1)
    accounts = make_accounts()
    published, log = Published(store, accounts), accounts.versions
    learner.put(store, (1, None))
    log.add(Announced(version.number, version.root, 0.0) for version in published.unlogged())
    learner.put(store, (2, None))
    assert published.unlogged() == (learner.versions[2].version,)
    assert published.has(1)
    assert log.root_of(1) == learner.versions[1].version.root
