"""The live dashboard in a real JupyterLab: it moves while the cell runs, an interrupt ends the run, knobs run the engine, richer views draw."""
from __future__ import annotations
import json, os, re, socket, subprocess, sys, time, urllib.request
from pathlib import Path
from typing import Any, Callable, Iterator
import pytest
from playwright.sync_api import Locator, Page, expect
from house import ROOT
from llminfer.controls import Play, play
from llminfer.dashboard import frames
from support.browser import chromium

CELLS = ["from llminfer.controls import Play, controls, watch_play",
    'log = watch_play(Play(requests=80, rate=0.3), pace=0.05).sync()\nprint("ended after", sum(e["event"] == "step" for e in log.events), "steps")',
    "panel = controls(Play(requests=40))\npanel.speed.value = 40\npanel",
    'watch_play(Play(requests=8), pace=0.01, view="anywidget").sync().n_emitted',
    'watch_play(Play(requests=8), pace=0.01, view="plotly").sync().n_emitted']
SLOW = 60_000   # ms: a hang bound
STEPS = len(list(frames(play(Play(requests=8)).events)))

def notebook() -> dict[str, Any]:
    cells: list[dict[str, Any]] = [{"cell_type": "code", "id": f"c{i}", "metadata": {}, "outputs": [], "execution_count": None, "source": s} for i, s in enumerate(CELLS)]
    return {"cells": cells, "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}, "nbformat": 4, "nbformat_minor": 5}

@pytest.fixture
def lab(tmp_path: Path) -> Iterator[str]:
    "The address of the notebook in a JupyterLab of its own."
    (work := tmp_path / "work").mkdir()
    (work / "live.ipynb").write_text(json.dumps(notebook()))
    with socket.create_server(("127.0.0.1", 0)) as s: port = s.getsockname()[1]
    env = os.environ | {f"JUPYTER_{k}_DIR": str(tmp_path / k) for k in ("CONFIG", "DATA", "RUNTIME")} | {"IPYTHONDIR": str(tmp_path / "ipython"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}", f"--ServerApp.root_dir={work}", "--IdentityProvider.token=",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate", "--ServerApp.log_level=ERROR"]
    p = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + 60
    try:
        while True:
            try: urllib.request.urlopen(url + "/api").close(); break
            except OSError: assert p.poll() is None and time.monotonic() < end, "JupyterLab did not start"; time.sleep(0.1)
        yield url + "/lab/tree/live.ipynb"
    finally:
        p.terminate()
        try: p.wait(20)
        except subprocess.TimeoutExpired: p.kill()

def run_cell(page: Page, i: int) -> Locator:
    "Run a cell; returns it. JupyterLab drops keys while it is still arranging itself: pressed again until the prompt changes."
    cell = page.locator(".jp-Notebook .jp-CodeCell").nth(i)
    prompt = cell.locator(".jp-InputArea-prompt")
    cell.scroll_into_view_if_needed()
    for _ in range(10):
        prompt.click()
        page.keyboard.press("Control+Enter")
        for _ in range(40):
            if prompt.inner_text() != "[ ]:": return cell
            page.wait_for_timeout(50)
    raise AssertionError(f"cell {i} does not run")

def steps(cell: Locator) -> int:
    "The step that the picture shows."
    m = re.search(r"step ([\d,]+):", " ".join(cell.locator("svg text").all_text_contents()))
    return int(m[1].replace(",", "")) if m else 0

def wait(page: Page, what: Callable[[], Any], seconds: float = 60) -> Any:
    end = time.monotonic() + seconds
    while not (got := what()): assert time.monotonic() < end; page.wait_for_timeout(50)
    return got

def busy(cell: Locator) -> bool: return "*" in cell.locator(".jp-InputArea-prompt").inner_text()

def test_the_live_dashboard_in_jupyterlab(lab: str, tmp_path: Path) -> None:
    with chromium(tmp_path / "chromium", 1280, 1400) as browser:
        page = browser.new_page()
        page.goto(lab)
        expect(page.locator(".jp-CodeCell")).to_have_count(len(CELLS), timeout=SLOW)
        expect(page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]")).to_be_visible(timeout=SLOW)
        first = run_cell(page, 0)
        expect(first.locator(".jp-InputArea-prompt")).to_contain_text("[1]", timeout=SLOW)

        cell = run_cell(page, 1)                                   # the core widget, in a loop of the cell's own thread
        seen = [wait(page, lambda: steps(cell))]
        for _ in range(3): seen.append(wait(page, lambda: (n := steps(cell)) > seen[-1] and n))
        assert busy(cell) and seen[-1] < 400, seen                 # four pictures while the cell was running; a full run has some 900 steps
        page.keyboard.press("Escape")
        page.keyboard.press("i"); page.keyboard.press("i")         # interrupt the kernel
        expect(cell.locator(".jp-OutputArea").first).to_contain_text("ended after", timeout=SLOW)
        wait(page, lambda: not busy(cell))
        assert "Traceback" not in cell.inner_text() and steps(cell) >= seen[-1]

        cell = run_cell(page, 2)                                   # knobs
        expect(cell.locator(".widget-slider")).to_have_count(12, timeout=SLOW)
        cell.locator("iframe").scroll_into_view_if_needed()        # a browser draws no frame that nobody sees
        expect(cell.frame_locator("iframe").locator(".title")).to_contain_text("Step 1 of", timeout=SLOW)
        before = cell.frame_locator("iframe").locator(".title").inner_text()
        old = steps(cell)
        cell.get_by_role("button", name="Run").click()
        expect(cell.get_by_role("button", name="Stop")).to_be_visible()
        a = wait(page, lambda: (n := steps(cell)) < old and n)     # a new picture, which grows
        wait(page, lambda: a < steps(cell) < old)
        cell.get_by_role("button", name="Stop").click()            # the kernel listens between two bites
        expect(cell.get_by_role("button", name="Run")).to_be_visible(timeout=SLOW)
        expect(cell.locator(".jp-OutputArea").first).to_contain_text("stopped")
        cell.locator("iframe").scroll_into_view_if_needed()
        expect(cell.frame_locator("iframe").locator(".title")).not_to_have_text(before, timeout=SLOW)
        if folder := os.environ.get("LLMINFER_SHOTS"): page.screenshot(path=f"{folder}/jupyter_knobs.png")

        cell = run_cell(page, 3)                                   # the page's renderer as a widget
        def shown() -> int: return int(m[1]) if (m := re.fullmatch(r"Step (\d+) of \1", cell.locator(".dash .title").inner_text())) else 0
        n = wait(page, shown)
        assert busy(cell) and n < 90, n                            # it draws while the cell runs
        expect(cell.locator(".jp-InputArea-prompt")).to_contain_text("[4]", timeout=SLOW)
        wait(page, lambda: shown() == STEPS)                       # nothing was lost on the way
        if folder: page.screenshot(path=f"{folder}/jupyter_anywidget.png")

        cell = run_cell(page, 4)                                   # plotly's FigureWidget
        expect(cell.locator(".js-plotly-plot .heatmaplayer image")).to_have_count(1, timeout=SLOW)
        expect(cell.locator(".jp-InputArea-prompt")).to_contain_text("[5]", timeout=SLOW)
        assert len(cell.locator(".scatterlayer path.js-line").first.get_attribute("d") or "") > 100
        if folder: page.screenshot(path=f"{folder}/jupyter_plotly.png")
