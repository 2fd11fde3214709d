"""Opens what a coordinator keeps of its run, and checks that the parts are of one run: ledger, store, data.

ledger --> balance --the data's rows, as noted--> accounts --other task options?--> groups refused
store  --> the head, which the ledger must know
"""

import asyncio
import logging
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from node.coordinator.config import CoordinatorConfig
from node.coordinator.data.row_sources import open_rows
from node.coordinator.data.rows import START_CHECK_S, RowCheck, Rows
from node.coordinator.ledger.ledger_file import FILE_NAME as LEDGER_FILE
from node.coordinator.ledger.ledger_rows import LedgerEngine
from node.coordinator.lifecycle.published import Published
from node.coordinator.metrics import CoordinatorMetrics
from node.coordinator.operators.older_orders import older_orders, set_aside
from node.coordinator.work.accounts import Accounts
from node.coordinator.work.balance import Balance, Transaction
from node.coordinator.work.decisions.announcements import task_is
from node.coordinator.work.orders.orders import Orders
from node.coordinator.work.terms.run_data import NO_DATA, agreed_data
from node.errors import ConfigError, Reason, RefusedError, StartupError
from node.process.role_context import RoleContext
from node.serving.hub_setup import open_store
from node.values.operator_order import Order
from node.weights.store.artifact_store import ArtifactStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenRun:
    """The parts of a run that a coordinator keeps, opened."""

    store: ArtifactStore
    accounts: Accounts
    published: Published
    rows: Rows | None
    """None: the coordinator has no data."""


async def open_run(
    context: RoleContext, config: CoordinatorConfig, ledger: LedgerEngine, metrics: CoordinatorMetrics
) -> OpenRun:
    """Open a run whose ledger is open; where that fails, close it.

    Raises:
        StartupError: the ledger, the store or the data cannot be opened, or the ledger was lost.
        ConfigError: a row is bad, or the data is not the run's.
    """
    with ExitStack() as opened:
        opened.enter_context(closing(ledger))
        store = open_store(context, retained_keyframes=config.retained_keyframes)
        balance, rows = _read(ledger), None
        if config.data is not None:
            known = balance.data if balance.slots.next_slot else NO_DATA
            rows = await asyncio.to_thread(
                open_rows,
                config.data,
                scratch=context.state_dir,
                columns=config.columns,
                known=known,
                check=RowCheck(config.built_in_options, limit_s=START_CHECK_S),
            )
            opened.callback(rows.close)
            _tell_unusable(rows)
        _note_data(ledger, balance, rows)
        _adopt_older_orders(context.state_dir, ledger, balance)
        accounts = _accounts(context, config, ledger, rows, metrics)
        published = Published(store, accounts)
        accounts.is_on_offer = published.is_on_offer
        _check_not_lost(accounts, published)
        opened.pop_all()  # the door closes them
    return OpenRun(store, accounts, published, rows)


def _read(ledger: LedgerEngine) -> Balance:
    """Read a ledger at the start. Raises StartupError: it is damaged; RefusedError: as ``balance``."""
    try:
        balance = ledger.balance()
    except RefusedError as error:
        if error.reason is not Reason.DAMAGED:
            raise
        raise StartupError(error.what, fix=f"{error.fix[:1].upper()}{error.fix[1:]}.") from error
    if balance.unknown_facts:
        logger.warning(
            "the ledger has facts of a newer release, which are kept",
            extra={"kinds": dict(balance.unknown_facts)},
        )
    return balance


def _accounts(
    context: RoleContext,
    config: CoordinatorConfig,
    ledger: LedgerEngine,
    rows: Rows | None,
    metrics: CoordinatorMetrics,
) -> Accounts:
    """Restore the accounts; refuse groups in the spool that were graded by other options than the run's."""
    balance, now = ledger.balance(), context.clock.now()
    prompts = config.own_prompts() if rows is None else rows.prompts
    terms = config.terms(context.run.run_id, prompts=prompts)
    accounts = Accounts(balance, terms, now=now)
    if rows is not None:
        accounts.is_usable = rows.is_usable
    decision = task_is(accounts, balance.task_digest, now=now)
    ledger.record(decision.transaction)
    accounts.apply(decision.transaction, now=now)
    if decision.answer:
        metrics.misgraded_groups.labels("task options").inc(decision.answer)
        logger.warning(
            "task options changed; groups graded by the old ones are refused",
            extra={"groups": decision.answer, "task_digest": config.task_digest.hex()},
        )
    return accounts


def _check_not_lost(accounts: Accounts, published: Published) -> None:
    """A new ledger would number slots from the start again: groups of two prompts would share their ids."""
    head = published.head()
    if accounts.learner is None and accounts.open_loss is None and head is not None:
        raise StartupError(
            f"the ledger knows of no learner, but version {head.number} was published",
            fix=f"Restore {LEDGER_FILE} from a backup: `heterorl-node ledger restore FILE --state-dir DIR`.",
        )


def _note_data(ledger: LedgerEngine, balance: Balance, rows: Rows | None) -> None:
    """Note the run's rows in the ledger; refuse others once something was leased."""
    found, known_part = (NO_DATA, b"") if rows is None else (rows.seen, rows.known_part)
    noted = agreed_data(balance.data, found, known_part=known_part, next_slot=balance.slots.next_slot)
    if noted is not None:
        ledger.record(Transaction(facts=(noted,)))
        if noted.first_slot:
            grown = {"rows": noted.rows, "rows_before": balance.data.rows, "first_slot": noted.first_slot}
            logger.info("rows were added to the data", extra=grown)


def _adopt_older_orders(state_dir: Path, ledger: LedgerEngine, balance: Balance) -> None:
    """Put the orders of an older release's files into the ledger. Raises StartupError: one is unreadable."""
    if adopted := older_orders(state_dir, Orders(balance.of(Order))):
        ledger.record(Transaction(facts=adopted))
    set_aside(state_dir)


def _tell_unusable(rows: Rows) -> None:
    """Log which rows are never leased; ConfigError where that leaves none."""
    tally = rows.tally
    if not tally.unusable:
        return
    held_out = sum(not rows.is_usable(index) for index in rows.evaluation)
    if tally.unusable - held_out == rows.prompts:
        raise ConfigError(
            key="coordinator.data.file",
            value=tally.checked,
            source="the configuration",
            rule=f"no row can be trained on: {tally.summary()}",
            fix="Correct the rows or coordinator.task_options.",
        )
    logger.warning(
        "rows that cannot be used are not leased",
        extra={
            "rows": tally.unusable,
            "rows_in_all": len(rows),
            "rows_held_out": held_out,
            "detail": tally.summary()[:2000],
        },
    )
