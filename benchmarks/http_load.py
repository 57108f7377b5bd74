"""Load on a real server: many clients, overload, disconnects. The server is a child process with a tiny model; clients are raw sockets on asyncio.

python benchmarks/http_load.py [all|clients|overload|leave] [--quick] [--json FILE]

clients   200 clients, 2,000 calls, half of them streams: every call must succeed
overload  calls at ten times the rate that the server finishes, for 30 s: accepted ones finish, the others get 503 (the goal is 50 ms at p99, on a quiet machine)
leave     500 clients go away in the middle: no block is held a moment later"""
from __future__ import annotations
import argparse, asyncio, json, os, platform, random, re, socket, subprocess, sys, threading, time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]


def serve(queue: int) -> None:
    "Child: a tiny model behind a queue of so many requests; prints the port, ends when standard input closes."
    from tempfile import mkdtemp
    import torch
    import uvicorn
    from llminfer.api import create_openai_app
    from llminfer.config import EngineConfig
    from llminfer.engine import InferenceEngine
    from llminfer.loading import make_tiny
    from llminfer.serving import ServingLimits
    torch.set_num_threads(1)
    engine = InferenceEngine(EngineConfig(str(make_tiny(Path(mkdtemp()) / "tiny")), device="cpu", dtype="float32", max_num_seqs=32, max_model_len=256))
    app = create_openai_app(engine, served_model_name="m", limits=ServingLimits(max_queued_requests=queue))
    s = socket.socket()
    s.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False, backlog=4096))
    def watch() -> None:
        sys.stdin.read()
        server.should_exit = True
    threading.Thread(target=watch, daemon=True).start()
    print(s.getsockname()[1], flush=True)
    server.run(sockets=[s])


class Child:
    "The server, for the time of a block."
    def __init__(self, queue: int):
        self.p = subprocess.Popen([sys.executable, __file__, "--serve", str(queue)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.p.stdout
        self.port = int(self.p.stdout.readline())
        for _ in range(300):
            try: socket.create_connection(("127.0.0.1", self.port)).close(); break
            except OSError: time.sleep(0.1)
    def __enter__(self) -> Child: return self
    def __exit__(self, *exc: object) -> None:
        assert self.p.stdin
        self.p.stdin.close()
        self.p.wait(60)


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


async def capacity(port: int, seconds: float, seed: int = 1) -> float:
    "Calls a second that the server finishes when it always has enough to do."
    rng, done, end = random.Random(seed), 0, time.perf_counter() + seconds
    async def client() -> None:
        nonlocal done
        while time.perf_counter() < end:
            await call(port, "POST", *request(rng, 32, rng.random() < 0.5))
            done += 1
    await asyncio.gather(*(client() for _ in range(48)))
    return done / seconds


async def overload(port: int, times: float, seconds: float, seed: int = 0) -> dict[str, Any]:
    "Calls arrive at so many times the server's capacity, whether or not earlier ones were answered."
    rate = times * await capacity(port, max(1.0, seconds / 6))
    rng, ok, refused, wrong = random.Random(seed), list[float](), list[float](), list[tuple[int, bytes]]()
    async def one() -> None:
        path, body = request(rng, 32, rng.random() < 0.5)
        status, out, s = await call(port, "POST", path, body)
        if status == 200 and (not body["stream"] or b"data: [DONE]" in out): ok.append(s)
        elif status == 503 and b"retry-after" in out.lower(): refused.append(s)
        else: wrong.append((status, out[-200:]))
    start, tasks = time.perf_counter(), list[asyncio.Task[None]]()
    while (now := time.perf_counter() - start) < seconds:
        tasks += [asyncio.create_task(one()) for _ in range(int(now * rate) - len(tasks))]
        await asyncio.sleep(0.002)
    await asyncio.gather(*tasks)
    p50, p99 = (round(sorted(refused)[int(len(refused) * q)] * 1e3, 1) if refused else None for q in (0.5, 0.99))
    return {"calls_s": round(rate), "seconds": seconds, "accepted": len(ok), "refused": len(refused), "wrong": len(wrong), "refused_p50_ms": p50, "refused_p99_ms": p99,
        "examples": [str(x) for x in wrong[:3]]}


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
    p.add_argument("--json", type=Path)
    p.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.serve: return serve(a.serve)
    small, out = 10 if a.quick else 1, {}
    if a.what in ("all", "clients"):
        with Child(4096) as c: out["clients"] = asyncio.run(many_clients(c.port, 200 // small, 2000 // small))
    if a.what in ("all", "overload"):
        with Child(64) as c: out["overload"] = asyncio.run(overload(c.port, 10, 30 / small))
    if a.what in ("all", "leave"):
        with Child(256) as c: out["leave"] = asyncio.run(leavers(c.port, 500 // small))
    for k, v in out.items(): print(k, json.dumps(v))
    good = all(not v.get("failed") and not v.get("wrong") and not v.get("blocks_held") and v.get("next_status", 200) == 200 for v in out.values())
    if a.json: a.json.write_text(json.dumps({"benchmark": "http_load", "python": platform.python_version(), "cpus": os.cpu_count(), **out}, indent=1))
    sys.exit(0 if good else 1)


if __name__ == "__main__": main()
