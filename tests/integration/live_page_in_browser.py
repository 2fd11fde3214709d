"""The page ``/`` of a coordinator in a real browser: ``make browser``.

Not in ``make test``: chromium has 300 MB.
"""

import asyncio
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from math import sin
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deploy.needs import tool_path
from node.page.html import rendered
from node.page.live_page import LivePage
from node.page.run_sections import RunView, run_sections
from node.page.samples_file import CompletionSample, GroupSample
from node.page.step_curves import StepCurves
from node.values.run import RunStatus, StepReport, Wait
from support.http_server import served
from support.hub import joined
from support.identity import MadeRun

pytestmark = pytest.mark.needs("chromium")

HOSTILE = "<img src=/pixel onerror=\"document.title='1'\"><script>document.title='2'</script><h1>"
STEP = StepReport(3, 0.5, 1.5, 4, 0.01, 0.8, 0.1, 1.0, 2.5, 0.9)
RUN = replace(
    RunStatus(HOSTILE, None, 1, (), {}, {}, STEP, 5, "staleness", 0.0),
    waits=(Wait(HOSTILE, HOSTILE, 1.0, HOSTILE),),
)


def browse(address: str, *flags: str) -> str:
    """Open an address in a browser, once; return what it prints."""
    program = tool_path("chromium")
    assert program is not None, "deploy/needs.py looked for it"
    command = [
        program,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1200,1000",
        *flags,
        address,
    ]
    # A file, not a pipe, which helpers that outlive the browser would hold open.
    with tempfile.TemporaryFile("w+") as printed:
        subprocess.run(command, stdout=printed, stderr=subprocess.DEVNULL, timeout=60, check=True)
        printed.seek(0)
        return printed.read()


def answers(
    pages: dict[str, Callable[[], bytes | None]], asked: list[str]
) -> Callable[[BaseHTTPRequestHandler, bytes], None]:
    def answer(request: BaseHTTPRequestHandler, _: bytes) -> None:
        asked.append(request.path)
        page = pages.get(request.path, lambda: None)()
        request.send_response(404 if page is None else 200)
        request.send_header("Content-Type", "text/html; charset=utf-8")
        request.end_headers()
        request.wfile.write(page or b"")

    return answer


async def test_a_browser_draws_the_curves_of_a_run(made: MadeRun, tmp_path: Path) -> None:
    async with joined(made) as (hub, learner, _):
        live = hub.hub.live
        for version in range(1, 101):
            live.note(replace(STEP, version=version, reward_mean=0.5 + 0.4 * sin(version / 20)))
        page_of = LivePage(hub.clock)
        page_of.add("first", live.sections, is_moving=True)
        with served("GET", answers({"/": page_of.render}, [])) as address:
            page = await asyncio.to_thread(browse, address, "--dump-dom")
            await asyncio.to_thread(browse, address, f"--screenshot={tmp_path / 'page.png'}")
    assert learner.identity.node_id in page
    picture = np.asarray(Image.open(tmp_path / "page.png").convert("RGB")).astype(int)
    is_blue = picture[:, :, 2] - picture[:, :, 0] > 40
    assert is_blue.any(axis=0).sum() > 800, "columns in which a curve is seen, of four times about 250"


async def test_a_browser_obeys_nothing_of_a_hostile_run_and_loads_nothing_for_it() -> None:
    asked: list[str] = []
    answer = CompletionSample(HOSTILE, 1.0, 0.5, 3, "end", 1, 1)
    group = GroupSample(1, 0.0, HOSTILE, HOSTILE, HOSTILE, 7, HOSTILE, 5, 1, 1, (answer,))
    view = replace(RunView.live(RUN, StepCurves.of_reports([STEP])), samples=[group])
    page = rendered(HOSTILE, "now", run_sections(view))
    with served("GET", answers({"/": lambda: page}, asked)) as address:
        shown = await asyncio.to_thread(browse, address, "--dump-dom")
    assert re.findall(r"<(?:img|script)\b", shown) == []
    assert shown.count("<h1") == 1
    assert re.search(r"<title>&lt;img src=/pixel", shown)
    assert set(asked) <= {"/", "/favicon.ico"}
