"""L1, L2, L8: what a server holds, seen from outside. The clients are those of benchmarks/http_load.py."""
from __future__ import annotations
import asyncio, os, subprocess, sys
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator
import http_load
from llminfer import core
from reliability.checks import tiny_server
from reliability.table import Counted, family

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def as_served() -> Iterator[None]:
    "Without the check of all books after every step, which no user has on: these rows measure time."
    before, audit = os.environ.pop("LLMINFER_AUDIT", None), core.AUDIT
    core.AUDIT = False
    try: yield
    finally:
        core.AUDIT = audit
        if before is not None: os.environ["LLMINFER_AUDIT"] = before


@family("L1", "Concurrent streams, failed-call rate: 200 clients, 2,000 calls, 0 failures", 2000, 60)
def many(seed: int, count: int, c: Counted) -> None:
    with http_load.Child(4096) as child: r = asyncio.run(http_load.many_clients(child.port, max(8, count // 10), count, seed))
    c.tried, c.good = r["calls"], r["calls"] - r["failed"]
    c.bad += r.pop("examples")
    c.notes |= r


@family("L2", "Overload: 10 x capacity for 30 s, accepted requests finish, the rest get 503 in under 50 ms at p99", 30, 1)
def overload(seed: int, count: int, c: Counted) -> None:
    "`count` is seconds; each call that left is a case."
    with as_served(), http_load.Child(*((64,) if count >= 30 else (8, "--max-num-seqs", "4"))) as child: r = asyncio.run(http_load.overload(child.port, 10.0, float(count), seed, child.p.pid))
    c.tried, c.good = r["accepted"] + r["refused"] + r["wrong"] + r["unanswered"], r["accepted"] + r["refused"]
    c.bad += r.pop("examples")
    if r["unanswered"]: c.bad.append(f"{r['unanswered']} calls have no answer")
    p99 = r["refused_ms"]["p99"]
    if p99 is None: c.spoil("nobody was refused: this was no overload")
    elif count >= 30 and p99 >= 50: c.spoil(f"a refusal took {p99} ms at p99 (the client was late by {r['client_late_ms']['p99']} ms)", 1)
    c.notes |= r


CLIENT = """
import asyncio, random, sys
sys.path[:0] = [sys.argv[1]]
import http_load
async def main(port, seconds):
    loop = asyncio.get_running_loop()
    end, n = loop.time() + seconds, 0
    async def one(i):
        nonlocal n
        while loop.time() < end:
            status, out, _ = await http_load.call(port, "POST", "/v1/completions", {"prompt": [3 + i, 30, 31], "max_tokens": 200, "stream": True, "ignore_eos": True, "temperature": 0})
            assert status == 200 and b"[DONE]" in out
            n += 1
    await asyncio.gather(*(one(i) for i in range(16)))
    print(n)
asyncio.run(main(int(sys.argv[2]), float(sys.argv[3])))
"""


@family("L8", "Event-loop health: p99 loop delay under 50 ms while 16 streams run", 20, 2)
def loop_delay(seed: int, count: int, c: Counted) -> None:
    "`count` is seconds; a case is a wake-up of the server's own loop that was due every 5 ms."
    with as_served(), tiny_server(dtype="float32") as s:
        p = subprocess.Popen([sys.executable, "-c", CLIENT, str(ROOT / "benchmarks"), str(s.port), str(count)], stdout=subprocess.PIPE, text=True)
        async def tick() -> list[float]:
            late, loop = [], asyncio.get_running_loop()
            while p.poll() is None:
                due = loop.time() + 0.005
                await asyncio.sleep(0.005)
                if s.engine.running: late.append(loop.time() - due)
            return late
        late = sorted(asyncio.run_coroutine_threadsafe(tick(), s.engine.loop).result(count + 60))
        streams = int(p.communicate()[0] or 0)
        s.settle()
    at = lambda q: round(late[int(q * (len(late) - 1))] * 1e3, 2) if late else 0.0
    c.tried = len(late)
    most = 0.05 if count >= 20 else 0.5                    # the sample only finds what hangs
    c.good = sum(x < most for x in late)
    c.notes |= {"late_ms": {"p50": at(0.5), "p99": at(0.99), "max": at(1.0)}, "streams": streams}
    if late and at(0.99) < most * 1e3: c.good = c.tried           # the rule is the 99th percentile
    else: c.bad.append(f"p99 {at(0.99)} ms")
