"""Orders in files of a state directory of release 0.3, read once, at the first start after the upgrade.

held_back   `all` and drained samplers     pardoned   samplers that were still to be pardoned, or `all`
revoked     nodes that are shut out        moved      the signed notice of a move
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from node.coordinator.work.orders.orders import Orders
from node.errors import StartupError
from node.identity.files import cannot_read
from node.identity.peer import is_name
from node.system import durable
from node.system.clock import moment_at_start
from node.values.operator_order import DRAIN, EVERYBODY, MOVE, PARDON, PAUSE, REVOKE, Order

logger = logging.getLogger(__name__)

_NODE_FILES: Final = {"held_back": DRAIN, "revoked": REVOKE, "pardoned.taken": PARDON, "pardoned": PARDON}
"""File with a node a line, and a remark after `#` -> the verb of its orders."""

_MOVE_FILE: Final = "moved"

_SET_ASIDE: Final = ".before-0.4"


def older_orders(state_dir: Path, known: Orders) -> tuple[Order, ...]:
    """Return the orders in older files, but for things that there is an order about.

    Raises StartupError: a file is there and cannot be read. A revocation may be in it.
    """
    found = {order.key: order for name in (*_NODE_FILES, _MOVE_FILE) for order in _orders(state_dir / name)}
    return tuple(order for order in found.values() if known.newest(order.verb, order.about) is None)


def set_aside(state_dir: Path) -> None:
    """Rename the files once the ledger has their orders. Raises StartupError: they cannot be renamed."""
    for path in (state_dir / name for name in (*_NODE_FILES, _MOVE_FILE)):
        if path.exists():
            aside = path.with_name(f"{path.name}{_SET_ASIDE}")
            try:
                durable.rename(path, aside)
            except OSError as error:
                raise StartupError(f"{path} cannot be renamed: {error}", fix="Check its owner.") from error
            logger.info(
                "orders of an older release are in the ledger now",
                extra={"file": path.name, "aside": str(aside)},
            )


def _orders(path: Path) -> Iterator[Order]:
    try:
        text, at_s = path.read_text(encoding="utf-8", errors="replace"), path.stat().st_mtime
    except FileNotFoundError:
        return
    except OSError as error:
        raise cannot_read(path, error, fix="Check path and owner.") from error
    by, order_id = f"the file {path.name}", f"file {path.name}"
    if path.name == _MOVE_FILE:
        yield Order(MOVE, value=text, at_s=at_s, by=by, order_id=order_id)
        return
    verb = _NODE_FILES[path.name]
    for line in text.splitlines():
        node_id, _, remark = map(str.strip, line.partition("#"))
        if not is_name(node_id):
            continue
        since_s, because = moment_at_start(remark)
        is_pause = verb == DRAIN and node_id == EVERYBODY
        yield Order(
            PAUSE if is_pause else verb,
            "" if is_pause else node_id,
            because=because,
            by=by,
            at_s=at_s if since_s is None else since_s,
            order_id=order_id,
        )
