"""The smallest role: says who it is, serves, and drains. Stands in for a role in tests of the process."""

import asyncio
import logging
from collections.abc import Callable

from node.process.role_context import RoleContext
from node.process.service import Service

_log = logging.getLogger("node.tiny_role")


class TinyService:
    name = "tiny"

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        ready()
        await stopping.wait()
        _log.info("drained")


async def build(context: RoleContext) -> list[Service]:
    """Log what the role was given."""
    _log.info(
        "built",
        extra={
            "node_id": context.node_id,
            "run_id": context.run.run_id,
            "state_dir": context.state_dir,
            "has_identity": context.identity is not None,
        },
    )
    return [TinyService()]
