"""F12-F14, F20, F22: a slow tokenizer, signals, a killed server, scrapes, and a long run."""
from __future__ import annotations
import asyncio, json, random, signal, socket, threading, time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
import psutil
from http_load import call, held
from llminfer.tokenization import Tokenizer
from reliability.checks import FAMILY_PROMPTS, get, ids_of, known_body, long_folder, plain_ids, post, probe, watched, within
from reliability.table import Counted, family
from support.api import http_bytes
from support.served import Served, popen, served

SERVE = ("-m", long_folder, "--device", "cpu", "--dtype", "float64", "--max-model-len", 8192)


def serve_args(*more: Any) -> tuple[Any, ...]: return tuple(x() if callable(x) else x for x in SERVE) + more


class Gaps(threading.Thread):
    "A stream that is read as it comes: the longest time without a token."
    def __init__(self, port: int, first: int):
        super().__init__(daemon=True)
        self.port, self.body, self.worst, self.n, self.over, self.error = port, json.dumps({"prompt": [first, 30, 31], "max_tokens": 4000, "temperature": 0, "ignore_eos": True, "stream": True}).encode(), 0.0, 0, False, ""

    def run(self) -> None:
        while not self.over:
            with socket.create_connection(("127.0.0.1", self.port), timeout=20) as k:
                k.sendall(http_bytes("/v1/completions", self.body))
                last = None
                while not self.over and (part := k.recv(1 << 16)):
                    now = time.monotonic()
                    if b'"error"' in part: self.error = part.decode()[:200]
                    if last is not None: self.worst = max(self.worst, now - last)
                    last, self.n = now, self.n + 1


@family("F12", "Tokenizer raises or is slow (2 s)", 100, 10)
def bad_tokenizer(seed: int, count: int, c: Counted) -> None:
    "Half of the prompts make it raise, half make it sleep for 2 s, eight at a time; four streams beside them never wait 300 ms for a token (in the full count; in the sample it is enough that no tokenizer runs on their loop)."
    most, threads = 0.3 if count >= 100 else 30.0, set[int]()
    encode, chat = Tokenizer.encode, Tokenizer.encode_chat
    def hurt(text: Any) -> None:
        threads.add(threading.get_ident())
        if "\u00a7raise" in str(text): raise RuntimeError("the tokenizer has a bad day")
        if "\u00a7sleep" in str(text): time.sleep(2)
    def slow_encode(self: Any, text: str, *a: Any, **kw: Any) -> Any:
        hurt(text)
        return encode(self, text, *a, **kw)
    def slow_chat(self: Any, messages: Any, *a: Any, **kw: Any) -> Any:
        hurt(messages)
        return chat(self, messages, *a, **kw)
    Tokenizer.encode, Tokenizer.encode_chat = slow_encode, slow_chat   # type: ignore[method-assign]
    rng = random.Random(seed)
    try:
        with watched(c, max_model_len=4096, neighbour=False) as s:
            streams = [Gaps(s.port, 3 + j) for j in range(4)]
            for g in streams: g.start()
            within(20, lambda: all(g.n > 3 for g in streams))
            def one(i: int) -> None:
                word = ("\u00a7raise", "\u00a7sleep")[i % 2]
                path, body = ("/v1/completions", {"prompt": f"{word} {i}"}) if rng.random() < 0.5 else ("/v1/chat/completions", {"messages": [{"role": "user", "content": f"{word} {i}"}]})
                with c.case(f"{i}, {word}, {path}"):
                    t = time.monotonic()
                    status = s.http.post(path, json=body | {"max_tokens": 2}).status_code
                    assert (status == 200 and time.monotonic() - t > 1.9) if i % 2 else status in (400, 500), status
                    probe(s.url, i % 8)
            with ThreadPoolExecutor(8) as pool: list(pool.map(one, range(count)))
            for g in streams: g.over = True
            for g in streams: g.join(20)
            worst = max(g.worst for g in streams)
            if s.thread.ident in threads: c.spoil("a tokenizer ran on the event loop")
            c.notes |= {"longest_gap_ms": round(worst * 1e3), "tokens_beside": sum(g.n for g in streams)}
            if worst > most or any(g.error for g in streams): c.spoil(f"a stream waited {worst:.2f} s for a token; {[g.error for g in streams if g.error]}")
    finally: Tokenizer.encode, Tokenizer.encode_chat = encode, chat   # type: ignore[method-assign]


@family("F13", "SIGTERM and SIGINT with 8 streams", 40, 1)
def signals(seed: int, count: int, c: Counted) -> None:
    "Half with a second signal, half with the engine in a process of its own: the end comes within the drain and 5 s, and no child is left."
    rng, took, drain = random.Random(seed), list[float](), 2.0
    def one(i: int) -> None:
        sig, twice, own = (signal.SIGTERM, signal.SIGINT)[i % 2], i // 2 % 2 == 1, i // 4 % 2 == 1
        with c.case(f"{i}, {sig.name}{' twice' if twice else ''}{', engine process' if own else ''}"), served(*serve_args("--drain", drain, "--engine", "process" if own else "thread")) as s:
            def read(j: int) -> list[str]:
                try: return list(s.stream(max_tokens=4000))
                except Exception as e: return [f"cut: {type(e).__name__}"]
            with ThreadPoolExecutor(8) as pool:
                streams = [pool.submit(read, j) for j in range(8)]
                within(20, lambda: json.loads(get(s.url, "/health")[1])["running"] == 8)
                children = psutil.Process(s.p.pid).children(recursive=True)
                assert bool(children) == own
                t = time.monotonic()
                s.p.send_signal(sig)
                if twice:
                    time.sleep(0.1 + rng.random() * 0.5)
                    s.p.send_signal(sig)
                code = s.p.wait(drain + 5 + 10)
                took.append(time.monotonic() - t)
                ends = [f.result(20) for f in streams]
            assert took[-1] <= drain + 5, f"it took {took[-1]:.1f} s"
            assert code == (130 if twice else 0), f"exit code {code}"
            assert all(e and (e[-1] == "[DONE]" or "error" in e[-1] or e[-1].startswith("cut")) for e in ends), [e[-1:] for e in ends]
            if not twice: assert not any(e[-1].startswith("cut") for e in ends), "a stream was cut though there was time to tell"
            left = psutil.wait_procs(children, 5)[1]
            assert not left, f"children are left: {left}"
    with ThreadPoolExecutor(1) as pool: list(pool.map(one, range(count)))
    c.notes |= {"drain_s": drain, "longest_end_s": round(max(took, default=0), 1)}


@family("F14", "SIGKILL, then restart on the same port", 20, 1)
def killed(seed: int, count: int, c: Counted) -> None:
    ready = list[float]()
    with socket.socket() as k:
        k.bind(("127.0.0.1", 0))
        port = k.getsockname()[1]
    def start() -> Served:
        t = time.monotonic()
        s = Served(popen("--port", port, "--log-level", "warning", *serve_args()))
        within(100, lambda: get(s.url, "/ready")[0] == 200)
        ready.append(time.monotonic() - t)
        return s
    s = start()
    try:
        probe(s.url)
        for i in range(count):
            with c.case(i), ThreadPoolExecutor(4) as pool:
                def read(j: int) -> None:
                    try: list(s.stream(max_tokens=4000))
                    except Exception: pass                   # it is cut
                busy = [pool.submit(read, j) for j in range(4)]
                within(20, lambda: json.loads(get(s.url, "/health")[1])["running"] == 4)
                s.p.kill()
                s.p.wait(10)
                for f in busy: f.result(20)
                s = start()
                assert ready[-1] <= (10 if count >= 20 else 100), f"ready after {ready[-1]:.1f} s"
                probe(s.url, i % 8)
    finally:
        s.p.kill()
        s.p.wait(10)
    c.notes["ready_s_max"] = round(max(ready), 1)


@family("F20", "Metrics scrape during load and during shutdown", 500, 30)
def scrapes(seed: int, count: int, c: Counted) -> None:
    "Ten a second, under the load of eight clients; the last tenth while the server drains."
    from prometheus_client.parser import text_string_to_metric_families
    last, over = max(5, count // 10), threading.Event()
    every = 0.1 if count >= 500 else 0.03
    with served(*serve_args("--drain", 300, "--metrics-names", "both")) as s, ThreadPoolExecutor(9) as pool:
        def load(j: int) -> int:
            n = 0
            while not over.is_set():
                i = (j + n) % FAMILY_PROMPTS
                status, body = post(s.url, known_body(i, stream=n % 2 == 0))
                if over.is_set(): break
                assert status == 200 and ids_of(body) == plain_ids(i), (i, status, body[:200])
                n += 1
            return n
        clients = [pool.submit(load, j) for j in range(8)]
        def scrape(i: int, what: str) -> None:
            with c.case(f"{i}, {what}"):
                status, body = get(s.url, "/metrics")
                assert status == 200, status
                names = {f.name for f in text_string_to_metric_families(body.decode())}
                assert {"llminfer_engine_state", "llminfer_kv_blocks", "vllm:num_requests_running"} <= names
            time.sleep(every)
        for i in range(count - last): scrape(i, "load")
        over.set()
        asked = sum(f.result(30) for f in clients)
        def read() -> None:
            try: list(s.stream(max_tokens=8000))
            except Exception: pass                       # the second signal cuts it
        streams = [pool.submit(read) for _ in range(8)]
        within(20, lambda: json.loads(get(s.url, "/health")[1])["running"] == 8)
        s.p.send_signal(signal.SIGTERM)
        for i in range(last): scrape(count - last + i, "shutdown")
        if not any(not f.done() for f in streams): c.spoil("the server was idle while it drained", last)
        s.p.send_signal(signal.SIGTERM)
        within(30, lambda: s.p.poll() is not None)
        assert s.p.wait() == 130
        for f in streams: f.result(10)
    c.notes["bystander_requests"], c.notes["bystander_wrong"] = asked, 0


@family("F22", "Long soak", 20_000, 200, nightly=True, counted=False)
def soak(seed: int, count: int, c: Counted) -> None:
    "1-8 tokens each, 16 clients, all of it compared; RSS and threads of the server, blocks in use."
    rng = random.Random(seed)
    jobs = [(rng.randrange(FAMILY_PROMPTS), rng.randrange(1, 9), rng.random() < 0.5) for _ in range(count)]
    for i in range(FAMILY_PROMPTS): plain_ids(i)
    rss, threads = dict[int, float](), dict[int, int]()
    with served(*serve_args("--max-num-seqs", 16)) as s:
        port, p, todo = int(s.url.rpartition(":")[2]), psutil.Process(s.p.pid), iter(enumerate(jobs))
        async def client() -> None:
            for k, (i, n, stream) in todo:
                n = min(n, known_body(i)["max_tokens"])
                with c.case(f"{k}, request {i} of {n} tokens"):
                    status, out, _ = await call(port, "POST", "/v1/completions", known_body(i, max_tokens=n, stream=stream))
                    body = out.split(b"\r\n\r\n", 1)[1]
                    if stream: body = b"\n".join(line for line in body.splitlines() if line.startswith(b"data: "))
                    assert status == 200 and ids_of(body) == plain_ids(i)[:n], (status, body[:200])
                if (k + 1) % max(1, count // 20) == 0: rss[k + 1], threads[k + 1] = p.memory_info().rss / 2**20, p.num_threads()
        async def main() -> tuple[float, float]:
            await asyncio.gather(*(client() for _ in range(16)))
            return await held(port)
        used, running = asyncio.run(main())
        within(5, lambda: asyncio.run(held(port)) == (0, 0))
        assert s.end() == 0
    start = next(k for k in sorted(rss) if k >= count // 10)
    growth = max(rss[k] for k in rss if k >= start) / rss[start] - 1
    c.notes |= {"rss_mb": {str(k): round(v, 1) for k, v in sorted(rss.items())}, "rss_growth": round(growth, 4), "threads": sorted(set(threads[k] for k in threads if k >= start)), "blocks_held": used, "requests_running": running}
    if growth >= 0.02 and count >= 20_000: c.spoil(f"RSS grew by {growth:.1%} after the first {start} requests")
    if len(c.notes["threads"]) != 1: c.spoil(f"threads: {c.notes['threads']}")
