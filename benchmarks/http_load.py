"""Load on a real server: many clients, overload, disconnects. The server is `llminfer serve` on a tiny model; clients are raw sockets on asyncio.

python benchmarks/http_load.py [all|clients|overload|leave] [--quick] [--json FILE]

clients   200 clients, 2,000 calls, half of them streams: every call must succeed
overload  calls at ten times the rate that the server finishes, for 30 s: accepted ones finish, the others get 503 (the goal: 50 ms at p99)
leave     500 clients go away in the middle: no block is held a moment later"""
from __future__ import annotations
import argparse, asyncio, gc, json, os, random, re, subprocess, sys, time
from collections import deque
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]


class Child:
    "`llminfer serve` on a tiny model, for the time of a block."
    def __init__(self, queue: int, *more: str):
        from llminfer.loading import make_tiny
        self.folder = TemporaryDirectory()
        model = str(make_tiny(Path(self.folder.name) / "tiny"))
        args = ["--model", model, "--port", "0", "--device", "cpu", "--dtype", "float32", "--max-num-seqs", "32", "--max-model-len", "256", "--max-queue-size", str(queue),
            "--served-model-name", "m", "--log-level", "error", "--json", *more]
        self.p = subprocess.Popen([sys.executable, "-m", "llminfer.cli", "serve", *args], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.p.stdout
        while (event := json.loads(self.p.stdout.readline()))["event"] != "ready": self.port = int(event.get("url", ":0").rpartition(":")[2])
        gc.collect()
        gc.freeze()       # the client is timed too: no pauses of its own
    def __enter__(self) -> Child: return self
    def __exit__(self, *exc: object) -> None:
        self.p.terminate()
        self.p.wait(60)
        self.folder.cleanup()


async def call(port: int, method: str, path: str, body: dict[str, Any] | None = None, leave_after: int | None = None) -> tuple[int, bytes, float]:
    "(status, answer, seconds); `leave_after`: go away after so many bytes."
    t = time.perf_counter()
    r, w = await asyncio.open_connection("127.0.0.1", port)
    data = b"" if body is None else json.dumps(body).encode()
    w.write(f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
    out = b""
    while leave_after is None or len(out) < leave_after:
        part = await r.read(1 << 16)
        if not part: break
        out += part
    w.close()
    return int(out[9:12] or 0), out, time.perf_counter() - t


async def held(port: int) -> tuple[float, float]:
    "(blocks in use, requests running) as the metrics tell."
    text = (await call(port, "GET", "/metrics"))[1].decode()
    used = re.search(r'^llminfer_kv_blocks\{[^}]*state="used"[^}]*\} (\S+)', text, re.M)
    running = re.search(r"^llminfer_num_requests_running\{[^}]*\} (\S+)", text, re.M)
    assert used and running, text[:500]
    return float(used[1]), float(running[1])


def request(rng: random.Random, n: int, stream: bool) -> tuple[str, dict[str, Any]]:
    words = " ".join(rng.choice("one two three four five six seven".split()) for _ in range(rng.randrange(2, 12)))
    if rng.random() < 0.5: return "/v1/completions", {"prompt": words, "max_tokens": n, "stream": stream, "ignore_eos": True, "seed": rng.randrange(9)}
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": words}], "max_tokens": n, "stream": stream, "ignore_eos": True}


async def many_clients(port: int, clients: int, calls: int, seed: int = 0) -> dict[str, Any]:
    rng, failed, times = random.Random(seed), [], []
    todo = [request(rng, rng.randrange(1, 17), rng.random() < 0.5) for _ in range(calls)]
    async def client() -> None:
        while todo:
            path, body = todo.pop()
            status, out, s = await call(port, "POST", path, body)
            times.append(s)
            if status != 200 or body["stream"] and not out.rstrip(b"\r\n0").endswith(b"data: [DONE]"): failed.append((status, out[-200:]))
    t = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return {"clients": clients, "calls": calls, "failed": len(failed), "calls_s": round(calls / (time.perf_counter() - t), 1), "p99_s": round(sorted(times)[int(len(times) * 0.99)], 3),
        "examples": [str(x) for x in failed[:3]]}


def prepared(rng: random.Random, n: int) -> bytes:
    "A whole request, ready to be sent."
    path, body = request(rng, n, rng.random() < 0.5)
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data


class Line(asyncio.Protocol):
    "A connection that is kept: one request at a time; `back` gets the answer and the moment of its last byte."
    def __init__(self, back: Callable[[Line, int, bytes, float], None]): self.back, self.out, self.sent = back, b"", 0.0
    def connection_made(self, transport: Any) -> None: self.transport = transport
    def ask(self, data: bytes) -> None:
        self.out, self.sent = b"", time.perf_counter()
        self.transport.write(data)
    def data_received(self, data: bytes) -> None:
        self.out += data
        if (end := self.out.find(b"\r\n\r\n")) < 0: return
        size = re.search(rb"content-length: (\d+)", self.out[:end])
        if len(self.out) - end - 4 >= int(size[1]) if size else self.out.endswith(b"0\r\n\r\n"):
            self.back(self, int(self.out[9:12]), self.out, time.perf_counter() - self.sent)


async def lines(port: int, n: int, back: Callable[[Line, int, bytes, float], None]) -> list[Line]:
    loop = asyncio.get_running_loop()
    return [(await loop.create_connection(lambda: Line(back), "127.0.0.1", port))[1] for _ in range(n)]


async def capacity(port: int, seconds: float, seed: int = 1) -> float:
    "Calls a second that the server finishes when it always has enough to do; counts for so long, and until it has 16."
    rng, done, over, start = random.Random(seed), 0, False, time.perf_counter()
    def back(line: Line, status: int, out: bytes, s: float) -> None:
        nonlocal done
        done += 1
        if not over: line.ask(prepared(rng, 32))
    opened = await lines(port, 48, back)
    for line in opened: line.ask(prepared(rng, 32))
    while (spent := time.perf_counter() - start) < seconds or done < 16: await asyncio.sleep(0.01)
    rate, over = done / spent, True
    await asyncio.sleep(1.0)      # what still runs
    for line in opened: line.transport.close()
    return rate


def at(q: float, values: list[float]) -> float | None: return round(sorted(values)[int(len(values) * q)] * 1e3, 2) if values else None


async def overload(port: int, times: float, seconds: float, seed: int = 0, pid: int | None = None) -> dict[str, Any]:
    """Calls leave by the clock at so many times the server's capacity, whether or not earlier ones were answered, over connections that are kept.

    A refusal is timed from the write to the last byte; `late` says by how much the client itself missed its clock, so that a slow client cannot pass for a fast server (or the other way round)."""
    rate = times * await capacity(port, max(1.0, seconds / 6))
    rng, ok, refused, late, wrong, idle = random.Random(seed), list[float](), list[float](), list[float](), list[tuple[int, bytes]](), deque[Line]()
    shots = [prepared(rng, 32) for _ in range(512)]
    def back(line: Line, status: int, out: bytes, s: float) -> None:
        if status == 200 and (b"text/event-stream" not in out or b"data: [DONE]" in out): ok.append(s)
        elif status == 503 and b"retry-after" in out.lower(): refused.append(s)
        else: wrong.append((status, out[-200:]))
        idle.append(line)
    opened = await lines(port, 256, back)
    idle.extend(opened)
    load, busy, server = os.getloadavg()[0], time.process_time(), cpu_of(pid)
    start, n, held = time.perf_counter(), 0, 0
    while (now := time.perf_counter() - start) < seconds:
        while n < now * rate and n < 10**7:
            if not idle:                    # 256 answers are owed: this one cannot leave
                held += 1
            else:
                late.append(time.perf_counter() - start - n / rate)
                idle.popleft().ask(shots[n % len(shots)])
            n += 1
        await asyncio.sleep(max(0.0, n / rate - (time.perf_counter() - start)))
    spent = (time.process_time() - busy) / seconds, (cpu_of(pid) - server) / seconds
    end = time.perf_counter() + 60
    while len(idle) < len(opened) and time.perf_counter() < end: await asyncio.sleep(0.01)
    for line in opened: line.transport.close()
    return {"calls_s": round(rate), "seconds": seconds, "accepted": len(ok), "refused": len(refused), "wrong": len(wrong), "unanswered": len(opened) - len(idle), "not_sent": held,
        "refused_ms": {q: at(float(q[1:]) / 100, refused) for q in ("p50", "p90", "p99", "p99.9")}, "client_late_ms": {q: at(float(q[1:]) / 100, late) for q in ("p50", "p99")},
        "client_cpu": round(spent[0], 2), "server_cpu": round(spent[1], 2), "load_before": round(load, 2), "load_after": round(os.getloadavg()[0], 2), "examples": [str(x) for x in wrong[:3]]}


def cpu_of(pid: int | None) -> float:
    "Processor seconds of a process so far."
    if pid is None: return 0.0
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


async def leavers(port: int, n: int, seed: int = 0) -> dict[str, Any]:
    rng, gate = random.Random(seed), asyncio.Semaphore(16)
    async def one() -> None:
        async with gate:
            stream = rng.random() < 0.7
            path, body = request(rng, 150, stream)
            try: await asyncio.wait_for(call(port, "POST", path, body, rng.randrange(0, 3000) if stream else None), 30 if stream else rng.random() * 0.3)
            except (TimeoutError, ConnectionError): pass
    await asyncio.gather(*(one() for _ in range(n)))
    t = time.perf_counter()
    while (await held(port)) != (0, 0) and time.perf_counter() - t < 10: await asyncio.sleep(0.005)
    used, running = await held(port)
    status = (await call(port, "POST", "/v1/completions", {"prompt": "still here?", "max_tokens": 2}))[0]
    return {"left": n, "blocks_held": used, "running": running, "free_after_ms": round((time.perf_counter() - t) * 1e3), "next_status": status}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", nargs="?", choices=["all", "clients", "overload", "leave"], default="all")
    p.add_argument("--quick", action="store_true", help="a tenth of the load")
    p.add_argument("--times", type=float, default=10.0, help="of the capacity")
    p.add_argument("--seconds", type=float, default=30.0, help="of overload")
    p.add_argument("--json", type=Path)
    p.add_argument("--engine", default="auto", help="where the server's engine lives: thread or process")
    a = p.parse_args()
    from llminfer.artifacts import environment
    small, out, engine = 10 if a.quick else 1, {}, ("--engine", a.engine)
    if a.what in ("all", "clients"):
        with Child(4096, *engine) as c: out["clients"] = asyncio.run(many_clients(c.port, 200 // small, 2000 // small))
    if a.what in ("all", "overload"):
        with Child(64, *engine) as c: out["overload"] = asyncio.run(overload(c.port, a.times, a.seconds / small, pid=c.p.pid))
    if a.what in ("all", "leave"):
        with Child(256, *engine) as c: out["leave"] = asyncio.run(leavers(c.port, 500 // small))
    for k, v in out.items(): print(k, json.dumps(v))
    good = all(not v.get("failed") and not v.get("wrong") and not v.get("unanswered") and not v.get("blocks_held") and v.get("next_status", 200) == 200 for v in out.values())
    if a.json: a.json.write_text(json.dumps({"kind": "http_load", "environment": environment(), "goal": {"refused_p99_ms": 50}, **out}, indent=1) + "\n")
    sys.exit(0 if good else 1)


if __name__ == "__main__": main()
