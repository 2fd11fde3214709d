import asyncio
from collections.abc import Callable

from node.process.service import StopsAfter


class Recorded:
    """Notes when it returns; does so a few turns of the loop after it was asked to."""

    def __init__(self, name: str, ended: list[str]) -> None:
        self.name = name
        self._ended = ended

    async def run(self, *, ready: Callable[[], None], stopping: asyncio.Event) -> None:
        ready()
        await stopping.wait()
        for _ in range(5):
            await asyncio.sleep(0)
        self._ended.append(self.name)


async def stop_all(*services: StopsAfter) -> None:
    stopping = asyncio.Event()
    running = [asyncio.create_task(one.run(ready=lambda: None, stopping=stopping)) for one in services]
    await asyncio.sleep(0)
    stopping.set()
    async with asyncio.timeout(5):
        await asyncio.gather(*running)


async def test_services_asked_at_once_stop_one_after_the_other() -> None:
    ended: list[str] = []
    first = StopsAfter(Recorded("training", ended))
    second = StopsAfter(Recorded("publisher", ended), other=first)
    third = StopsAfter(Recorded("uploader", ended), other=second)
    await stop_all(third, second, first)
    assert ended == ["training", "publisher", "uploader"]


async def test_nobody_waits_for_a_service_that_never_started() -> None:
    ended: list[str] = []
    membership = StopsAfter(Recorded("membership", ended), other=StopsAfter(Recorded("drain", ended)))
    await stop_all(membership)
    assert ended == ["membership"]
