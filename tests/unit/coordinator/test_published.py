"""Which versions a group may name, with a real store."""

from pathlib import Path

from node.coordinator.lifecycle.published import Published
from node.coordinator.work.accounts import Accounts
from node.coordinator.work.version_log import Announced
from node.weights.store.artifact_store import ArtifactStore
from support.coordinator import make_accounts
from support.weights import Learner


def offered(store: ArtifactStore, accounts: Accounts) -> Published:
    """Return what a store offers, as the coordinator asks it."""
    published = Published(store, accounts)
    accounts.is_on_offer = published.is_on_offer
    return published


def test_before_the_first_version_only_the_base_model_may_be_named(tmp_path: Path) -> None:
    accounts = make_accounts()
    published = offered(Learner().store(tmp_path), accounts)
    assert published.head() is None
    assert [accounts.has_been_made(number) for number in (0, 1)] == [True, False]
    assert published.unlogged() == ()


def test_a_version_may_be_named_from_its_announcement_on(tmp_path: Path) -> None:
    learner = Learner()
    store = learner.store(tmp_path)
    accounts = make_accounts()
    published = offered(store, accounts)
    learner.put(store, (1, None), (3, 1))
    assert published.head() == learner.versions[3].version
    assert [accounts.has_been_made(number) for number in (1, 2, 3)] == [True, False, True]


def test_a_version_the_store_has_forgotten_may_still_be_named(tmp_path: Path) -> None:
    learner = Learner()
    store = learner.store(tmp_path, retained_keyframes=1)
    accounts = make_accounts()
    published, log = offered(store, accounts), accounts.versions
    learner.put(store, (1, None))
    log.add(Announced(version.number, version.root, 0.0) for version in published.unlogged())
    learner.put(store, (2, None))
    assert published.unlogged() == (learner.versions[2].version,)
    assert accounts.has_been_made(1)
    assert log.root_of(1) == learner.versions[1].version.root
