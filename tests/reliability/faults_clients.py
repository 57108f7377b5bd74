"""F1-F4: clients that leave, cut, or stop to read."""
from __future__ import annotations
import asyncio, json, random, socket, struct, threading, time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any
from reliability.checks import gather_limited, ids_of, probe, watched
from reliability.table import Counted, family
from llminfer.serving import ServingLimits
from support.api import http_bytes


def long_body(rng: random.Random, stream: bool, n: int = 200) -> bytes:
    return json.dumps({"prompt": [rng.randrange(3, 90), *(rng.randrange(20, 500) for _ in range(rng.randrange(1, 30)))], "max_tokens": n, "temperature": 0, "ignore_eos": True, "stream": stream}).encode()


def close_early(c: Counted, limit: int, cases: list[tuple[Any, bytes]], when: str, wait: Callable[[asyncio.StreamReader, Any], Awaitable[Any]]) -> None:
    "Send each body, wait as its case says, close, and ask again; `limit` at once."
    with watched(c) as s:
        async def one(i: int) -> None:
            what, body = cases[i]
            with c.case(f"{i}, closed after {when.format(what)}"):
                r, w = await asyncio.open_connection("127.0.0.1", s.port)
                w.write(http_bytes("/v1/completions", body))
                with closing(w): await wait(r, what)
                await asyncio.to_thread(probe, s.url, i % 8)
        asyncio.run(gather_limited(len(cases), limit, one))


@family("F1", "Client closes a stream (random chunk)", 500, 32)
def closed_streams(seed: int, count: int, c: Counted) -> None:
    rng, chunks = random.Random(seed), [0] * 9
    async def read(r: asyncio.StreamReader, k: int) -> None:
        seen = 0
        while seen < k and (line := await asyncio.wait_for(r.readline(), 30)): seen += line.startswith(b"data: ")
        chunks[seen] += 1
        assert seen == k, f"only {seen} chunks came"
    close_early(c, 16, [(rng.randrange(9), long_body(rng, True)) for _ in range(count)], "chunk {}", read)
    c.notes["closed_after_chunk"] = chunks


@family("F2", "Client closes before a non-stream reply", 200, 16)
def closed_calls(seed: int, count: int, c: Counted) -> None:
    rng = random.Random(seed)
    close_early(c, 8, [(rng.random() * 0.3, long_body(rng, False)) for _ in range(count)], "{:.3f} s", lambda _, pause: asyncio.sleep(pause))


@family("F3", "TCP reset in the middle of a body", 100, 12)
def resets(seed: int, count: int, c: Counted) -> None:
    rng = random.Random(seed)
    cases = [http_bytes("/v1/completions", long_body(rng, rng.random() < 0.5)) for _ in range(count)]
    with watched(c) as s:
        def one(i: int) -> None:
            with c.case(i):
                with socket.create_connection(("127.0.0.1", s.port), timeout=10) as k:
                    k.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))     # close is a reset
                    head = cases[i].index(b"\r\n\r\n") + 4
                    k.sendall(cases[i][:head + (len(cases[i]) - head) // 2])
                probe(s.url, i % 8)
        with ThreadPoolExecutor(4) as pool: list(pool.map(one, range(count)))


class Buffers:
    "The most bytes that the server has held for one connection, seen every 20 ms on its own event loop."
    def __init__(self, s: Any): self.s, self.most, self.over = s, 0, False
    def look(self) -> None:
        for p in list(self.s.uvicorn.server_state.connections):
            if (t := getattr(p, "transport", None)) is not None: self.most = max(self.most, t.get_write_buffer_size())
        for r in list(self.s.engine.running): self.most = max(self.most, sum(len(ch.token.encode()) + 200 * len(ch.logprobs or ()) + 8 * len(ch.token_ids) for ch in r.buffer.chunks))
    def run(self) -> None:
        while not self.over:
            done = threading.Event()
            def look(done: threading.Event = done) -> None:
                self.look()
                done.set()
            self.s.engine.loop.call_soon_threadsafe(look)
            done.wait(1)
            time.sleep(0.02)


@family("F4", "Reader stops reading (slow client)", 50, 4)
def slow_readers(seed: int, count: int, c: Counted) -> None:
    "A receive buffer of 4 KiB and a pause of 30 s (3 s in the sample), answers of 3 MB: what is held for each stays under 1 MiB, and each gets its whole text."
    rng, pause = random.Random(seed), 30.0 if count >= 50 else 3.0
    n = 1500 if count >= 50 else 400
    bodies = [json.dumps({"prompt": [3 + i, 40 + i % 7, 50], "max_tokens": n, "temperature": 0, "ignore_eos": True, "stream": True, "logprobs": 5, "return_token_ids": True}).encode() for i in range(count)]
    with watched(c, max_model_len=2048, max_num_seqs=64, limits=ServingLimits(stall_s=120, max_buffered_tokens=10**6)) as s:
        s.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)      # the kernel takes little, so that the server must
        buffers = Buffers(s)
        watcher = threading.Thread(target=buffers.run, daemon=True)
        watcher.start()
        def one(i: int) -> None:
            with c.case(i):
                k = socket.socket()
                k.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                k.settimeout(120)
                k.connect(("127.0.0.1", s.port))
                with k:
                    k.sendall(http_bytes("/v1/completions", bodies[i]))
                    out = k.recv(4096)
                    time.sleep(pause + rng.random())
                    parts = [out]
                    while part := k.recv(1 << 16): parts.append(part)
                raw = b"".join(parts)
                text = dechunked(raw.split(b"\r\n\r\n", 1)[1])
                ids = ids_of(text)
                assert ids is not None and len(ids) == n and text.rstrip().endswith(b"[DONE]"), (len(ids or ()), text[-200:])
                probe(s.url, i % 8)
        with ThreadPoolExecutor(count) as pool: list(pool.map(one, range(count)))
        buffers.over = True
        watcher.join(5)
    c.notes |= {"pause_s": pause, "tokens_each": n, "most_bytes_held_for_one": buffers.most}
    if not 2**12 < buffers.most < 2**20: c.spoil(f"{buffers.most} bytes were held for one stream")


def dechunked(body: bytes) -> bytes:
    out, at = [], 0
    while (end := body.find(b"\r\n", at)) >= 0 and (size := int(body[at:end], 16)):
        out.append(body[end + 2:end + 2 + size])
        at = end + 4 + size
    return b"".join(out)
