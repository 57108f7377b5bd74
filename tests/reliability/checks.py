"""What must hold whatever is done to a server: it answers, the next request equals the plain run, neighbours notice nothing, no block stays held."""
from __future__ import annotations
import asyncio, json, random, threading, time, urllib.error, urllib.request
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Iterator, Sequence
from llminfer.config import CacheConfig, EngineConfig
from llminfer.engine import InferenceEngine
from llminfer.loading import make_tiny
from llminfer.request import GenerationRequest
from llminfer.serving import ServingLimits
from reliability.table import Counted
from support.api import Server, serving
from support.engines import CACHE, oracle, settle, tiny_engine

FAMILY_PROMPTS = 24     # requests whose plain text is known


def known(i: int) -> tuple[list[int], int]:
    "Prompt and number of tokens of the i-th known request; the first id tells them apart."
    rng = random.Random(i)
    return [100 + i, *(rng.randrange(20, 500) for _ in range(rng.randrange(2, 40)))], rng.randrange(4, 25)


@cache
def plain_ids(i: int) -> list[int]:
    "The whole-sequence recomputation, in fp64: no cache, no batch, no engine."
    ids, n = known(i)
    return oracle(ids, n)


def ask_known(i: int, **kw: Any) -> GenerationRequest:
    ids, n = known(i)
    return GenerationRequest(prompt_token_ids=ids, **{"max_new_tokens": n, "temperature": 0.0, "ignore_eos": True} | kw)


def known_body(i: int, **kw: Any) -> dict[str, Any]:
    ids, n = known(i)
    return {"prompt": ids, "max_tokens": n, "temperature": 0, "ignore_eos": True, "return_token_ids": True} | kw


def post(url: str, body: Any, timeout: float = 60) -> tuple[int, bytes]:
    "(status, body) of a completion; 0 if the connection was cut."
    r = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(r, timeout=timeout) as a: return a.status, a.read()
    except urllib.error.HTTPError as e: return e.code, e.read()


def get(url: str, path: str, timeout: float = 10) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(url + path, timeout=timeout) as a: return a.status, a.read()
    except urllib.error.HTTPError as e: return e.code, e.read()


def ids_of(body: bytes) -> list[int] | None:
    "Token ids of an answer, streamed or whole; None: it is or holds an error."
    if not body.startswith(b"data: ") and not body.startswith(b":"):
        d = json.loads(body)
        return None if "error" in d else d["choices"][0]["token_ids"]
    out: list[int] = []
    for line in body.decode().splitlines():
        if not line.startswith("data: ") or line == "data: [DONE]": continue
        d = json.loads(line[6:])
        if "error" in d: return None
        for ch in d["choices"]: out += ch.get("token_ids") or []
    return out


def probe(url: str, i: int = 0) -> None:
    "It is healthy, and the next request equals the plain run."
    status, body = get(url, "/health")
    assert status == 200, (status, body[:200])
    status, body = post(url, known_body(i))
    assert status == 200 and ids_of(body) == plain_ids(i), (status, body[:200])


class Neighbour:
    "Known requests, one after the other, in a thread of their own: their texts must not change."
    def __init__(self, url: str, seed: int = 0, first: int = FAMILY_PROMPTS - 6):
        self.url, self.rng, self.first, self.n, self.wrong, self.over = url, random.Random(seed), first, 0, list[str](), False
        for i in range(first, FAMILY_PROMPTS): plain_ids(i)
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self) -> None:
        while not self.over:
            i = self.rng.randrange(self.first, FAMILY_PROMPTS)
            try:
                status, body = post(self.url, known_body(i, stream=self.rng.random() < 0.5))
                if status != 200 or ids_of(body) != plain_ids(i): self.wrong.append(f"request {i}: {status} {body[:300]!r}")
            except Exception as e: self.wrong.append(f"request {i}: {type(e).__name__}: {e}")
            self.n += 1

    def __enter__(self) -> Neighbour:
        self.thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.over = True
        self.thread.join(60)


@cache
def long_folder() -> Path:
    "The tiny model of `support.engines.tiny`, with room for long texts."
    return make_tiny(Path(mkdtemp()) / "long", "llama", 0, max_position_embeddings=8192)


def tiny_server(limits: ServingLimits | None = None, **cfg: Any) -> Any:
    "That model in fp64 behind HTTP."
    cache_cfg = CacheConfig(**{CACHE[k]: cfg.pop(k) for k in list(cfg) if k in CACHE})
    settings: dict[str, Any] = {"dtype": "float64", "max_model_len": 256, "max_num_seqs": 16, "seed": 0} | cfg
    return serving(InferenceEngine(EngineConfig(str(long_folder()), device="cpu", cache=cache_cfg, **settings)), served_model_name="tiny", limits=limits)


def settle_server(s: Server) -> None:
    "Nothing runs, no block is held, the pool's books balance."
    s.settle(20)
    settle(s.engine.handle.engine)


@contextmanager
def watched(c: Counted, neighbour: bool = True, **kw: Any) -> Iterator[Server]:
    "A tiny server over HTTP with a neighbour beside the cases; what has changed for it, or stayed held, spoils the family."
    with tiny_server(**kw) as s:
        probe(s.url)
        if neighbour:
            with Neighbour(s.url, c.seed) as n: yield s
            c.notes["bystander_requests"], c.notes["bystander_wrong"] = n.n, len(n.wrong)
            if n.wrong or not n.n: c.spoil(f"{len(n.wrong)} of {n.n} neighbours are not as they were: {n.wrong[:2]}")
        else: yield s
        try: settle_server(s)
        except Exception as e: c.spoil(f"not clean at the end: {type(e).__name__}: {e}")
        else: c.notes["blocks_held"] = 0


@contextmanager
def engine_at_rest(c: Counted, **kw: Any) -> Iterator[Any]:
    "A tiny engine without a server; at its end no block may be held."
    e = tiny_engine(**{"max_model_len": 128} | kw)
    try:
        yield e
        try: settle(e, 20)
        except Exception as err: c.spoil(f"not clean at the end: {type(err).__name__}: {err}")
        else: c.notes["blocks_held"] = 0
    finally: e.unload()


def together(e: Any, which: Sequence[int], **kw: Any) -> list[Any]:
    "Results of known requests that run together."
    return e.run_requests([ask_known(i, **kw) for i in which])


async def gather_limited(n: int, limit: int, one: Any) -> None:
    "one(i) for every i below n, at most `limit` at once."
    gate = asyncio.Semaphore(limit)
    async def run(i: int) -> None:
        async with gate: await one(i)
    await asyncio.gather(*(run(i) for i in range(n)))


def within(seconds: float, what: Any, every: float = 0.02) -> float:
    "Seconds until something is true; raises if that takes longer than it may."
    t = time.monotonic()
    while not what():
        if time.monotonic() - t > seconds: raise AssertionError(f"still not so after {seconds} s")
        time.sleep(every)
    return time.monotonic() - t
