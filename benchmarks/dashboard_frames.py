"""How fast the dashboard loads and scrubs a log of 10,000 steps, in headless Chromium: milliseconds a frame, the size of the page.

    python benchmarks/dashboard_frames.py [--steps 10000] [--jumps 200] [--out FILE]

A frame is everything that moving the cursor does: replay to it, words, tiles, four canvases. Jumps go all over the log, which is
the worst case; a slider that is dragged and a replay that plays move by little.
"""
from __future__ import annotations
import argparse, json, statistics, sys, tempfile
from pathlib import Path
from typing import Any
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from playwright.sync_api import BrowserContext
from llminfer.artifacts import environment
from llminfer.controls import Play, play
from llminfer.tracing import Trace
from support.browser import chromium

def shifted(e: dict[str, Any], dt: float, k: int) -> dict[str, Any]:
    "An event of a later run, by other requests."
    pair = {"out": lambda x: [[q + k, n] for q, n in x], "rows": lambda x: [[r, q + k] for r, q in x],
        "prefill": lambda x: x if isinstance(x, int) else [[r, q + k, a, n] for r, q, a, n in x], "tables": lambda x: [[q + k, *r] for q, *r in x]}
    more = {name: f(e[name]) for name, f in pair.items() if name in e}
    return e | {"t": e["t"] + dt} | ({"seq": e["seq"] + k} if "seq" in e else {}) | more

def long_log(steps: int = 10_000) -> Trace:
    "The same engine again and again, later and with other requests, until there are so many steps."
    part, t, n = list(play(Play(n_blocks=200, rows=8, requests=100, rate=0.14, tokens=100)).events), Trace(capacity=1_000_000), 0
    mine = sum(e["event"] == "step" for e in part)
    while n < steps:
        last = t.events[-1]["t"] if t.events else 0.0
        t.take([shifted(e, last, len(t.events)) for e in part])
        n += mine
    return t

JUMP = """async n => { const d = await window.dashboard, all = d.log.frames.length, out = [], frame = () => new Promise(ok => requestAnimationFrame(ok));
    for (let i = 0; i < n; i++) { d.go(i * 7919 * 37 % all); await frame(); await frame(); out.push(d.took); }
    return {steps: all, ms: out.sort((a, b) => a - b)}; }"""

def measure(browser: BrowserContext, page_file: Path, jumps: int) -> dict[str, Any]:
    "Open a page and jump about."
    page = browser.new_page()
    page.set_viewport_size({"width": 1280, "height": 900})
    page.goto(page_file.as_uri())
    load = page.evaluate("async () => { await window.dashboard; return performance.now(); }")
    got = page.evaluate(JUMP, jumps)
    page.close()
    ms = got["ms"]
    return {"steps": got["steps"], "page_bytes": page_file.stat().st_size, "load_ms": round(load, 1), "frame_ms_median": round(statistics.median(ms), 2),
        "frame_ms_p95": round(ms[int(0.95 * len(ms))], 2), "frame_ms_max": round(ms[-1], 2)}

def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=10_000)
    p.add_argument("--jumps", type=int, default=200)
    p.add_argument("--out", default=str(ROOT / "benchmarks/records/dashboard_frames.json"))
    a = p.parse_args()
    with tempfile.TemporaryDirectory() as d, chromium(Path(d) / "profile") as browser:
        long_log(a.steps).to_html(f := Path(d) / "big.html")
        row = measure(browser, f, a.jumps)
        version = browser.browser.version if browser.browser else ""
    record = {"kind": "dashboard_frames", "jumps": a.jumps, "chromium": version, "environment": environment(), "rows": [row]}
    Path(a.out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(row))

if __name__ == "__main__": main()
