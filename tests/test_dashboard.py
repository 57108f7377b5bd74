"""The dashboard in Chromium: a page without a network, a server's page, an iframe, a widget; the same state as the Python replay, fast over a long log, usable at 360 pixels and by ear."""
from __future__ import annotations
import asyncio, importlib, json, shutil, subprocess, sys, threading, time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Awaitable, Callable, Iterator
import pytest
from playwright.sync_api import BrowserContext, Page, expect
from llminfer.config import ConfigError, EngineConfig
from benchmarks.dashboard_frames import long_log, measure
from llminfer.api import create_openai_app
from llminfer.controls import Controls, Play, Run, controls, outcome, play, watch_play
from llminfer.dashboard import VIEWS, Frame, Tail, device_line, event_stream, frames, live_page, make_view, story, watch
from llminfer.engine_handle import ThreadHandle
from llminfer.engine_process import ProcessHandle
from llminfer.events import StepReplay
from llminfer.loading import make_tiny
from llminfer.request import GenerationRequest
from llminfer.tracing import Trace, inject
from support.api import Server
from support.browser import chromium
from support.engines import tiny_engine
from support.serving import make_scripted, scripted

from house import ROOT

TIGHT = Play(n_blocks=14, rate=0.3, requests=18, seed=2)

@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserContext]:
    with chromium(tmp_path_factory.mktemp("chromium")) as context: yield context

@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, Path]:
    t, f = play(TIGHT), tmp_path_factory.mktemp("page") / "tight.html"
    t.to_html(f)
    return t, f

@contextmanager
def opened(browser: BrowserContext, url: str, width: int = 1280, height: int = 900, offline: bool = True) -> Iterator[Page]:
    "A page with nothing wrong in its console; without a network unless it has a server."
    page, faults = browser.new_page(), list[str]()
    page.set_viewport_size({"width": width, "height": height})
    page.on("pageerror", lambda e: faults.append(str(e)))
    page.on("console", lambda m: faults.append(m.text) if m.type == "error" and "401" not in m.text else None)
    if offline: page.on("request", lambda r: None if r.url.startswith(("file:", "data:", "blob:", "about:")) else faults.append("asks " + r.url))
    page.goto(url)
    page.wait_for_function("window.dashboard !== undefined")
    page.evaluate("async () => { window.d = await window.dashboard; }")
    try: yield page
    finally: page.close()
    assert not faults, faults

def at(page: Page, f: int) -> None:
    page.evaluate("f => new Promise(ok => { d.go(f); requestAnimationFrame(() => requestAnimationFrame(ok)); })", f)

STATE = """() => ({tables: Object.fromEntries([...d.state.tables].filter(([, t]) => t.length)), cached: [...d.state.cached].sort((a, b) => a - b), drain: [...d.state.drain.keys()].sort((a, b) => a - b),
    states: Object.fromEntries(d.log.seqs.filter(s => s.from <= d.at).map(s => [s.id, [d.log.stateOf(s, d.at), d.log.tokensAt(s, d.at)]]))})"""

@pytest.mark.parametrize("load", [TIGHT, Play(n_blocks=20, window=4, draft=2, rate=0.5, requests=12), Play(n_blocks=64, rate=1.0, requests=8)], ids=["tight", "windows", "roomy"])
def test_the_page_knows_what_the_replay_knows(browser: BrowserContext, tmp_path: Path, load: Play) -> None:
    t = play(load)
    t.to_html(tmp_path / "p.html")
    want, r = [], StepReplay()
    for f in frames(t.events):
        for e in f.events: r.apply(e)
        want.append({"tables": {str(q): list(s.blocks) for q, s in r.seqs.items() if s.blocks}, "cached": sorted(r.cached), "drain": sorted(r.draining),
            "states": {str(q): [s.state, s.tokens] for q, s in r.seqs.items()}})
    with opened(browser, f"file://{tmp_path}/p.html") as page:
        assert page.evaluate("d.log.frames.length") == len(want) > 30
        for f in [*range(0, len(want), 17), len(want) - 1, 3, 30, 29, 0]:            # forwards, and jumps back
            at(page, f)
            got = page.evaluate(STATE)
            for q, (state, _) in want[f]["states"].items():                         # a request that ends in this step is still drawn in it
                if state == "done" and got["states"][q][0] != "done": got["states"][q][0] = "done"
            assert got == want[f], f
            assert page.locator(".title").inner_text() == f"Step {f + 1} of {len(want)}"

@pytest.mark.parametrize("width", [1280, 360])
def test_without_a_network_on_any_screen(browser: BrowserContext, tight: tuple[Trace, Path], width: int) -> None:
    with opened(browser, f"file://{tight[1]}", width) as page:
        at(page, 40)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        for name in ("kv", "rate", "req"):
            c = page.locator(f"canvas.{name}")
            assert c.get_attribute("role") == "img" and len(c.get_attribute("aria-label") or "") > 12
            colours = page.evaluate("n => { const c = d.root.querySelector('canvas.' + n), x = c.getContext('2d').getImageData(0, 0, c.width, c.height).data, s = new Set(); for (let i = 0; i < x.length; i += 4) if (x[i + 3]) s.add((x[i] >> 4) + ',' + (x[i + 1] >> 4) + ',' + (x[i + 2] >> 4)); return s.size; }", name)
            assert colours > 3, name
        for box in page.locator("button, select, input[type=range]").all():
            if box.is_visible(): b = box.bounding_box(); assert b and b["x"] >= 0 and b["x"] + b["width"] <= width + 1
        page.emulate_media(color_scheme="dark")
        page.wait_for_function("d.el.dataset.theme === 'dark'")
        page.emulate_media(color_scheme="light")

@pytest.mark.parametrize("width", [1280, 360])
def test_nobody_who_is_here_is_left_out_of_the_list(browser: BrowserContext, tmp_path: Path, width: int) -> None:
    play(Play(n_blocks=200, rows=12, requests=12, rate=1.0)).to_html(tmp_path / "p.html")
    with opened(browser, f"file://{tmp_path}/p.html", width) as page:
        at(page, page.evaluate("d.log.frames.findIndex(f => f.running > 8)"))
        assert page.locator(".here button").count() > 8
        last = page.locator(".here button").last
        last.scroll_into_view_if_needed()
        clipped = page.evaluate("() => { const e = d.root.querySelector('.words'); return getComputedStyle(e).overflowY !== 'visible' && e.scrollHeight > e.clientHeight + 1; }")
        assert width > 760 or not clipped
        last.click()
        expect(last).to_have_attribute("aria-pressed", "true")

def test_play_keys_and_speed(browser: BrowserContext, tight: tuple[Trace, Path]) -> None:
    with opened(browser, f"file://{tight[1]}") as page:
        page.get_by_label("One step on").click()
        expect(page.locator("p[aria-live]")).to_contain_text("Step 2 of")            # told to a screen reader
        page.locator(".scrub").focus()
        page.keyboard.press("ArrowRight")
        assert page.evaluate("d.at") == 2 and (page.get_attribute(".scrub", "aria-valuetext") or "").startswith("step ")
        page.select_option(".speed", "200")
        page.locator(".scrub").press(" ")
        expect(page.locator(".play")).to_have_text("Pause")
        expect(page.locator(".play")).to_have_text("Play", timeout=20000)            # it ends at the end
        assert page.evaluate("d.at === d.log.frames.length - 1")
        page.select_option(".span", "60")
        at(page, 50)
        assert page.evaluate("d.view()") == [20, 80]

def test_words_pins_and_the_table(browser: BrowserContext, tight: tuple[Trace, Path]) -> None:
    fs = list(frames(tight[0].events))
    f = next(i for i, x in enumerate(fs) if any(e["event"] == "preempt" for e in x.events))
    seq = next(e["seq"] for e in fs[f].events if e["event"] == "preempt")
    with opened(browser, f"file://{tight[1]}") as page:
        at(page, f)
        assert f"Request {seq} is sent back to the queue" in page.inner_text(".say")
        page.click("summary")
        row = page.locator("tbody tr", has=page.locator("th", has_text=str(seq)))
        expect(row.first).to_contain_text("preempted")
        page.locator(".here button", has_text=f"Request {seq}").first.click()
        expect(page.locator(".pin")).to_contain_text("It holds no blocks")
        assert page.locator(".here button[aria-pressed=true]").count() == 1
        page.get_by_role("button", name="Clear").click()
        page.locator("canvas.kv").hover(position={"x": 12, "y": 12})
        expect(page.locator(".tip")).to_contain_text("Block 1")

def test_files_are_loaded_and_wrong_ones_named(browser: BrowserContext, tight: tuple[Trace, Path], tmp_path: Path) -> None:
    with opened(browser, f"file://{tight[1]}") as page:
        small = play(Play(requests=2))
        small.save(tmp_path / "s.jsonl")
        page.set_input_files("input[type=file]", str(tmp_path / "s.jsonl"))
        expect(page.locator(".title")).to_have_text(f"Step 1 of {len(list(frames(small.events)))}")
        for text, why in (("{}\n", "line 1 is no event"), ("<b>", "line 1 is not JSON: <b>"), ('{"t":0,"event":"start","schema":9}', "newer than this page"), ('{"event":"x","schema_version":3}', "convert it with")):
            (tmp_path / "w.jsonl").write_text(text)
            page.set_input_files("input[type=file]", str(tmp_path / "w.jsonl"))
            expect(page.locator(".error")).to_contain_text(why)
        assert page.evaluate("d.log.frames.length") == len(list(frames(small.events)))   # what was there stays

def test_ten_thousand_steps_scrub_fast(browser: BrowserContext, tmp_path: Path) -> None:
    "benchmarks/records/dashboard_frames.json has the figures; here a hang bound, ten times the promise."
    long_log().to_html(tmp_path / "big.html")
    got = measure(browser, tmp_path / "big.html", 50)
    assert got["steps"] >= 10_000 and got["page_bytes"] < 3_000_000 and got["frame_ms_p95"] < 1000, got
    record = json.loads((ROOT / "benchmarks/records/dashboard_frames.json").read_text())["rows"][0]
    assert record["steps"] >= 10_000 and record["page_bytes"] < 3_000_000 and record["frame_ms_max"] < 100

def test_in_an_iframe_and_as_a_widget(browser: BrowserContext, tight: tuple[Trace, Path], tmp_path: Path) -> None:
    (tmp_path / "nb.html").write_text(f"<!doctype html><title>n</title><p>before</p>{tight[0].to_html()}")
    page = browser.new_page()
    page.goto(f"file://{tmp_path}/nb.html")
    expect(page.frame_locator("iframe").locator(".title")).to_contain_text("Step 1 of")
    page.close()
    with opened(browser, f"file://{tight[1]}") as page:         # anywidget's contract, with its part of the model
        got = page.evaluate("""async lines => {
            const source = document.querySelector('script[type=module]').textContent.replace(/window\\.dashboard = [^]*$/, ''), m = await import(URL.createObjectURL(new Blob([source], {type: 'text/javascript'})));
            const el = document.createElement('div'), calls = {}; document.body.append(el);
            let whole = ''; const count = x => x.trim().split('\\n').length, n = count(lines[0]);
            const model = {get: () => whole, on: (n, f) => calls[n] = f, off: (n, f) => { if (calls[n] === f) delete calls[n]; }};
            const clean = m.default.render({model, el}), title = () => new Promise(ok => setTimeout(() => ok(el.shadowRoot.querySelector('.title').textContent), 60));
            calls['msg:custom']({from: n, lines: lines[1]}); const none = await title();          // what came before was missed
            whole = lines[0]; calls['change:lines'](); const a = await title();
            calls['msg:custom']({from: n, lines: lines[1]}); whole = lines[0] + lines[1]; calls['change:lines'](); const b = await title();
            clean(); return [none, a, b, Object.keys(calls).length]; }""",
            [part for part in _halves(tight[0])])
        n = len(list(frames(tight[0].events)))
        assert got[0] == "No step yet" and got[1].startswith("Step ") and int(got[2].split(" of ")[1]) == n - 1 and got[3] == 0     # the last step is closed by what follows it

def _halves(t: Trace) -> list[str]:
    lines = t.lines().splitlines(keepends=True)
    return ["".join(lines[:300]), "".join(lines[300:])]

def test_a_docs_page_replays_without_a_network(browser: BrowserContext, tmp_path: Path) -> None:
    "As `make docs` makes it: the stored replay of notebook 23 works in the site's page; only the site's own styles and formulas come from elsewhere."
    shutil.copy(ROOT / "nbs/23_dashboard.ipynb", tmp_path / "dashboard.ipynb")
    (tmp_path / "_quarto.yml").write_text("project:\n  type: website\nwebsite:\n  title: t\n")
    r = subprocess.run(["smalldocs", "render", str(tmp_path)], capture_output=True, text=True)
    assert r.returncode == 0, r.stderr
    page = browser.new_page()
    page.route("http*://**", lambda route: route.abort())
    page.goto(next(tmp_path.rglob("dashboard.html")).as_uri(), wait_until="domcontentloaded")
    for width in (1280, 360):
        page.set_viewport_size({"width": width, "height": 800})
        frame = page.locator("iframe")
        frame.scroll_into_view_if_needed()
        inside = page.frame_locator("iframe")
        expect(inside.locator(".title")).to_contain_text("Step ")
        before = inside.locator(".title").inner_text()
        inside.get_by_label("One step on").click()
        expect(inside.locator(".title")).not_to_have_text(before)
        box = frame.bounding_box()
        assert box and box["width"] <= width
    page.close()

# --- a server ----------------------------------------------------------------------------------------------------------------------------

def traced(away: bool) -> ThreadHandle | ProcessHandle:
    "An engine without a model that keeps a log, here or in a process of its own."
    return ProcessHandle(EngineConfig(model_name="0.004", trace=True), make_scripted) if away else ThreadHandle(scripted(0.004, trace=True))

@pytest.mark.parametrize("away", [False, True], ids=["thread", "process"])
def test_a_server_shows_its_engine_at_work(browser: BrowserContext, away: bool) -> None:
    handle = traced(away)
    server = Server(create_openai_app(handle, api_key="secret"))
    ask: dict[str, Any] = {"headers": {"authorization": "Bearer secret"}, "json": {"prompt": [5] * 20, "max_tokens": 60, "ignore_eos": True, "temperature": 0}}
    def steps(page: Page, least: int = 0) -> int:
        "Steps that the page knows; waits for so many. (The page's policy forbids Playwright's own waiting.)"
        end = time.monotonic() + 20
        while (n := page.evaluate("d.log.frames.length")) < least: assert time.monotonic() < end, n; page.wait_for_timeout(50)
        return n
    try:
        page_head = server.http.get("/dashboard").headers
        assert "script-src 'sha256-" in page_head["content-security-policy"] and server.http.get("/dashboard/events").status_code == 401
        with opened(browser, server.url + "/dashboard", offline=False) as page:       # under that policy; a fault would be in the console
            page.get_by_label("API key").fill("wrong")
            page.get_by_role("button", name="Watch").click()
            expect(page.get_by_role("alert").filter(has_text="does not accept this key")).to_be_visible()
            page.get_by_label("API key").fill("secret")
            page.get_by_role("button", name="Watch").click()
            expect(page.locator(".feed")).to_have_text("live")
            expect(page.locator(".door")).to_be_hidden()
            expect(page.locator(".title")).to_have_text("No step yet")
            assert server.http.post("/v1/completions", **ask).status_code == 200
            before = steps(page, 59)          # the last one too, after a moment
            with opened(browser, server.url + "/dashboard", offline=False) as second: # whoever comes later gets the beginning too
                second.get_by_label("API key").fill("secret")
                second.get_by_role("button", name="Watch").click()
                steps(second, before)
            thread = threading.Thread(target=server.http.post, args=("/v1/completions",), kwargs=ask)
            thread.start()
            assert before + 5 < steps(page, before + 6)
            thread.join(20)
            assert steps(page, before + 59) == 2 * before
            assert page.evaluate("d.at === d.log.frames.length - 1")                   # it follows
        if isinstance(handle, ProcessHandle):
            end = time.monotonic() + 10
            while handle.started.watchers: assert time.monotonic() < end; time.sleep(0.02)
    finally: server.close()
    assert not server.thread.is_alive() and "secret" not in live_page()                # an open stream does not hold the server

def test_an_engine_without_a_log_says_so() -> None:
    with pytest.MonkeyPatch.context() as m:
        m.delenv("LLMINFER_API_KEY", raising=False)
        server = Server(create_openai_app(scripted()))
    try:
        for path in ("/dashboard", "/dashboard/events"):
            r = server.http.get(path)
            assert r.status_code == 404 and "--dashboard" in r.json()["error"]["message"]
    finally: server.close()

def in_a_loop(f: Callable[[], Awaitable[Any]]) -> Any:
    "Await in a thread: Playwright has a loop in this one."
    out = list[Any]()
    t = threading.Thread(target=lambda: out.append(asyncio.run(f())))  # type: ignore[arg-type]
    t.start()
    t.join()
    return out[0]

def test_the_stream_says_old_things_then_new_ones_and_gives_signs_of_life() -> None:
    t = play(Play(requests=2))
    async def read() -> tuple[list[Any], bytes]:
        got, n = list[Any](), len(t.events)
        stream = event_stream(t, every_s=0.001, beat_s=0.01, batch=50)
        async for m in stream:
            if m.startswith(b":"): break
            got += json.loads(m[6:])
            if len(got) == n: t.enabled = True; t.emit("evict", blocks=[1])
        await stream.aclose()  # type: ignore[attr-defined]
        return got, m
    got, beat = in_a_loop(read)
    assert got == list(t.events) and beat == b": still here\n\n"

# --- notebooks ---------------------------------------------------------------------------------------------------------------------------

def test_watch_an_engine_answer_and_stop() -> None:
    e = tiny_engine(max_model_len=256, speculative_num_assistant_tokens=0)
    try:
        w = watch(e, [GenerationRequest(prompt="hello", max_new_tokens=20, ignore_eos=True) for _ in range(3)])
        results = w.sync()
        assert [len(r.token_ids) for r in results] == [20] * 3 and w.view.tail.replay.n_tokens == 60 and "<svg" in w.view.bundle()["text/html"]
        w = watch(e, [GenerationRequest(prompt="hello", max_new_tokens=240, ignore_eos=True)])
        ticks = iter(range(3))
        real = w.tick
        def tick() -> bool:
            if next(ticks, None) is None and not w.stopped: raise KeyboardInterrupt    # as a kernel's interrupt
            return real()
        w.tick = tick  # type: ignore[method-assign]
        with inject("model.forward", lambda **k: time.sleep(0.01), times=10 ** 6): [r] = w.sync()     # 240 tokens take a while
        assert w.stopped and r.finish_reason == "abort" and len(r.token_ids) < 240
        with pytest.raises(ConfigError, match="keeps no event log"): watch(type("E", (), {"backend": type("B", (), {"name": "upstream"})()})(), [])
    finally: e.unload()

def test_watch_awaits_and_tells_errors() -> None:
    async def go() -> Any: return await watch_play(Play(requests=3), pace=0.0001, hz=50).wait()
    assert in_a_loop(go).n_emitted > 50
    with pytest.raises(ConfigError, match="n_blocks 3 is too small"): watch_play(Play(n_blocks=3)).sync()
    with pytest.raises(ConfigError, match="rate must be above 0"): play(Play(rate=0))

def test_controls_run_and_refuse() -> None:
    panel = controls(Play(requests=3))
    assert isinstance(panel, Controls) and panel.page.value.startswith("<iframe srcdoc=") and "the run before" not in panel.say.value
    before = panel.page.value
    panel.sliders["n_blocks"].value, panel.sliders["requests"].value, panel.sliders["rate"].value = 14, 20, 0.5
    panel.run()                     # a click would start a task: Playwright has a loop in this thread
    assert "times no block was left" in panel.say.value and "the run before" in panel.say.value and panel.page.value != before and "<svg" in panel.view.widget.value
    panel.sliders["n_blocks"].value = 8
    panel.run()
    assert "n_blocks 8 is too small" in panel.say.value and panel.button.description == "Run"
    bundle = panel._repr_mimebundle_()
    assert "n_blocks 8" in bundle["text/html"] and bundle["application/vnd.jupyter.widget-view+json"]["model_id"] == panel.box.model_id

def test_a_button_stops_a_run_on_a_loop() -> None:
    async def go() -> tuple[str, str, int]:
        panel = controls(Play(requests=3))
        panel.sliders["requests"].value, panel.speed.value = 80, 10
        panel.button.click()                                     # starts a task
        await asyncio.sleep(0.3)
        name = panel.button.description
        panel.button.click()
        await panel.task
        return name, panel.say.value, panel.view.tail.n_steps
    name, said, n = in_a_loop(go)
    assert name == "Stop" and said.startswith("<b>stopped</b>") and 0 < n < 40

def test_what_a_notebook_lacks_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    "B38: HTML in every bundle, and no exception for a missing package."
    shown: list[dict[str, Any]] = []
    class Screen:
        def update(self, data: dict[str, Any], **kw: Any) -> Screen:
            shown.append(data)
            return self
    monkeypatch.setattr("IPython.display.display", lambda data, **kw: Screen().update(data))
    for kind in VIEWS:
        w = watch_play(Play(requests=2), pace=0, view=kind)
        w.sync()
        assert type(w.view) is VIEWS[kind] and "<svg" in shown[-1]["text/html"] and shown[-1]["text/plain"], kind
        assert ("application/vnd.jupyter.widget-view+json" in shown[-1]) == (kind != "html")
    assert capsys.readouterr().out == ""
    for lack, kind, got in (("anywidget", "anywidget", "widgets"), ("plotly", "plotly", "widgets"), ("ipywidgets", "widgets", "html")):
        monkeypatch.setitem(sys.modules, lack, None)
        if lack == "plotly": monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
        assert type(make_view(kind)) is VIEWS[got]
        out = capsys.readouterr().out
        assert out.count("\n") == 1 and lack in out and "pip install" in out
    t = controls(Play(requests=2))
    assert isinstance(t, Trace) and "<iframe" in (t._repr_html_() or "") and capsys.readouterr().out.count("\n") == 1

def test_the_line_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    assert device_line() == "no GPU is used here"
    for name, value in (("is_available", True), ("mem_get_info", (30 * 2**30, 40 * 2**30)), ("get_device_name", "T4"), ("utilization", 87), ("power_draw", 61_500)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert device_line() == "T4: 10.0 of 40.0 GiB in use, 87% busy, 62 W"
    monkeypatch.setattr(torch.cuda, "utilization", lambda: importlib.import_module("no_such_library"))      # without NVML's package
    assert device_line() == "T4: 10.0 of 40.0 GiB in use; its load needs nvidia-ml-py"

def test_a_model_gives_the_same_kind_of_log(tmp_path: Path) -> None:
    from llminfer.loading import load_model
    model = load_model(make_tiny(tmp_path / "tiny"), "float32")
    t = play(Play(requests=4, prompt=20, tokens=20, rate=0.5), model)
    runs = [Run(Play(requests=3, prompt=20, tokens=200, rate=0.5, n_blocks=80, draft=n), model) for n in (0, 3)]
    for r in runs:
        while not r.done: r.step()
    assert runs[0].texts == runs[1].texts and runs[1].trace.counters["draft_tokens"] > 0 and outcome(runs[1].trace).tokens == sum(map(len, runs[1].texts.values()))
    tail = Tail().feed(t.events)
    assert {s.state for s in tail.replay.seqs.values()} == {"done"} and not tail.replay.owners() and tail.hit > 0 and "<svg" in tail._repr_html_()
    assert isinstance(f := tail.last[0], Frame) and story(f)[0].startswith(f"{f.step['batch']} row")
