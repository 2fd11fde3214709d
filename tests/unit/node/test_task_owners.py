"""Every task has an owner, which looks at what it raises."""

import ast
import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import grpc.aio

from node.clients.rollouts.rollout_drain import RolloutDrain
from node.system.backoff import Backoff
from node.system.waits import drop, put_away, run_until
from support.lost_errors import no_error_is_lost

ROOT: Final = Path(__file__).parents[3]

MAKERS: Final = ("asyncio.create_task", "asyncio.ensure_future")

OWNED_OTHERWISE: Final = {
    "node/coordinator/transactions/run_ledger.py self._worker": "it tells its requests what it meets",
    "node/process/daemon.py services": "awaited at once",
    "node/rpc/strangers/entrance.py task": "one of `tasks`, which are put away",
    "node/coordinator/requests/model_servicer.py self._listing": "awaited by whoever asks",
    "node/weights/transfer/lane.py": "one of `_decoding`, which are gathered",
    "node/weights/transfer/sources.py watches": "gathered",
    "sampler/tasks/environments/drawn_turns.py asking": "a queue's, which raises nothing",
    "sampler/tasks/processes/grader_pool.py self._starting": "gathered; it takes its own errors",
    "sampler/tasks/processes/grader_process.py self._printing": "put away under another name",
}


def failing(error: Callable[[], Exception]) -> Any:
    async def fail(*_: object) -> None:
        raise error()

    return fail


def lost_connection() -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())


async def test_a_drain_whose_coordinator_stops_while_it_writes_loses_no_error() -> None:
    """gRPC ends a write that is cancelled with the stream's error, after the read has told it."""

    async def write(_: object) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise lost_connection()

    call = SimpleNamespace(read=failing(lost_connection), write=write, cancel=lambda: True)
    channel: Any = SimpleNamespace(stream_stream=lambda *_, **__: lambda: call)
    for name in ("unary_unary", "unary_stream", "stream_unary"):
        setattr(channel, name, lambda *_, **__: None)
    stopping, losses = asyncio.Event(), []

    def lose() -> None:
        losses.append(True)
        if len(losses) == 3:
            stopping.set()

    drain = RolloutDrain(
        channel,
        lambda _: None,
        learner_epoch=1,
        version=0,
        capacity_groups=4,
        unacknowledged=(),
        backoff=Backoff(lambda: 0.0),
        count_lost_stream=lose,
        waiting=lambda _: (_ for _ in ()).throw(AssertionError),
    )

    with no_error_is_lost():
        await drain.run(ready=lambda: None, stopping=stopping)
    assert 3 <= len(losses) <= 4  # one more may be opened before the drain has ended


async def test_work_that_fails_while_its_caller_is_cancelled_is_looked_at() -> None:
    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ConnectionResetError

    with no_error_is_lost():
        caller = asyncio.create_task(run_until(asyncio.Event(), work()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        caller.cancel()
        await asyncio.wait({caller})
        assert caller.cancelled()
        del caller


async def test_tasks_that_are_put_away_or_dropped_have_ended_and_lose_no_error() -> None:
    async def refuses() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise OSError("late") from None

    with no_error_is_lost():
        tasks = [asyncio.create_task(one) for one in (refuses(), failing(ValueError)(), asyncio.sleep(60))]
        await asyncio.sleep(0)
        await put_away(*tasks)
        assert all(task.done() for task in tasks)
        dropped = asyncio.create_task(refuses())
        await asyncio.sleep(0)
        drop(dropped)
        await asyncio.wait({dropped})
        del tasks, dropped


def unowned_tasks() -> Iterator[str]:
    """Yield where the product makes a task that is neither put away nor dropped nor a wait for an event."""
    for package in ("node", "learner", "sampler"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if not any(maker in (text := path.read_text()) for maker in MAKERS):
                continue
            tree, name = ast.parse(text), str(path.relative_to(ROOT))
            looked_at = {text for function in ("put_away", "drop") for text in arguments_of(function, tree)}
            for statement in ast.walk(tree):
                if isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr) and makes_task(
                    statement.value
                ):
                    targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
                    held = [ast.unparse(one) for one in targets if one is not None]
                    held = [part for one in held for part in one.strip("()").split(", ")]
                    if not set(held) & looked_at:
                        yield " ".join([name, *(one.partition("[")[0] for one in held)])


def arguments_of(function: str, tree: ast.AST) -> Iterator[str]:
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == function:
            yield from (ast.unparse(one).removeprefix("*") for one in call.args)


def makes_task(expression: ast.expr | None) -> bool:
    return expression is not None and any(
        isinstance(call, ast.Call)
        and ast.unparse(call.func) in MAKERS
        and not ast.unparse(call.args[0]).endswith(".wait()")
        for call in ast.walk(expression)
    )


def test_every_task_is_put_away_or_has_another_owner() -> None:
    found = set(unowned_tasks()) - {"node/system/waits.py task"}
    assert found == OWNED_OTHERWISE.keys()
