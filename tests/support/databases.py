"""A PostgreSQL server for the tests of a process, a database for each test, ledgers of either engine."""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from node.coordinator.ledger.ledger_file import Ledger

if TYPE_CHECKING:
    from deploy.runs.postgresql_server import PostgresqlServer

ENGINES = [pytest.param("sqlite"), pytest.param("postgresql", marks=pytest.mark.needs("postgresql"))]
"""For ``indirect`` parameters of ``open_ledger``."""

_numbers = itertools.count()


@pytest.fixture(scope="session")
def postgresql() -> "Iterator[PostgresqlServer]":
    """A server that is started for the first test that asks for it."""
    from deploy.runs.postgresql_server import postgresql_server  # an extra, which `make test-vllm` lacks

    with postgresql_server(is_durable=False) as server:
        yield server


@pytest.fixture
def database(postgresql: "PostgresqlServer") -> str:
    """The address of an empty database."""
    return postgresql.create(f"test{next(_numbers)}")


@pytest.fixture(params=ENGINES)
def open_ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Any]:
    """Opens the test's ledger, again where it was closed, in each engine."""
    if request.param == "sqlite":
        return lambda: _closing(Ledger.open(tmp_path / "state" / "ledger.sqlite", run_id="run"))
    url = request.getfixturevalue("database")
    return lambda: leading(url)


@contextmanager
def _closing(ledger: Ledger) -> Iterator[Ledger]:
    try:
        yield ledger
    finally:
        ledger.close()


@contextmanager
def leading(url: str, *, run_id: str = "run") -> Iterator[Any]:
    """Lead a run, and open its ledger."""
    from node.coordinator.ledger.leadership import Leadership

    lost: list[Exception] = []
    with ExitStack() as opened:
        leadership = Leadership(url, run_id=run_id, address="hub:7700")
        opened.callback(leadership.close)
        deadline_s = time.monotonic() + 10  # in which the server may notice who led before has gone
        while not leadership.try_to_lead():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        ledger = leadership.open_ledger(on_lost=lost.append)
        opened.callback(ledger.close)
        yield ledger
    assert not lost
