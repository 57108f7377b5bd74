"""Bad and edge inputs over HTTP: I1 (bytes), I2 (types), I3 (pairs of sampling settings), I4 (token ids), I5 (lengths), I8 (chats), I9 (headers)."""
from __future__ import annotations
import itertools, json, random
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Iterator
from reliability.table import Counted, family
from support import bad_http
from support.api import Server, serving, tiny_http
from support.engines import all_closed, oracle, tiny_engine

PLAIN: dict[str, Any] = {"prompt": [7, 8, 9, 10], "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@contextmanager
def attacked(c: Counted, **cfg: Any) -> Iterator[Server]:
    "A tiny server that must stand afterwards: nothing runs, no block is held, health is 200 and a plain request has its plain answer."
    with tiny_http(max_model_len=64, **cfg) as s:
        want = s.complete(**PLAIN)["choices"]
        yield s
        try: s.settle()
        except AssertionError as e: c.spoil(f"the server is not idle: {e}"[:300])
        if s.http.get("/healthz").status_code != 200: c.spoil("health is not 200")
        if s.complete(**PLAIN)["choices"] != want: c.spoil("the next plain request got another answer")


def attack(name: str, seed: int, count: int, c: Counted) -> None:
    "The families that `support.bad_http` makes and judges."
    with attacked(c) as s: r = bad_http.attack(s.port, name, count, seed)
    c.tried, c.good = c.tried + r.n, c.good + r.n - len(r.faults)
    c.bad += [f"{name} seed {seed}: {f}"[:600] for f in r.faults]
    c.notes |= {"statuses": {str(k): v for k, v in sorted(r.codes.items())}, "slowest_s": round(r.slowest_s, 2)}


@family("I1", "Malformed JSON and bytes", goal=2000, sample=120)
def malformed(seed: int, count: int, c: Counted) -> None: attack("I1", seed, count, c)


@family("I2", "Wrong type or range in every field", goal=600, sample=90)
def wrong_types(seed: int, count: int, c: Counted) -> None: attack("I2", seed, count, c)


@family("I8", "Shapes of chats", goal=200, sample=40)
def chat_shapes(seed: int, count: int, c: Counted) -> None: attack("I8", seed, count, c)


@family("I9", "Headers and methods", goal=100, sample=25)
def odd_requests(seed: int, count: int, c: Counted) -> None: attack("I9", seed, count, c)


def ask(s: Server, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    r = s.http.post(path, json=body, timeout=bad_http.LIMIT_S)    # longer is a hang, and raises
    return r.status_code, r.json()


def refused(answer: tuple[int, Any], *params: str) -> None:
    "It must be a 400 that names one of the fields."
    status, body = answer
    assert status == 400, (status, str(body)[:200])
    assert set(body["error"]) == {"message", "type", "param", "code"} and str(body["error"]["param"]).replace("[", ".").split(".")[0] in params, body


# I3: two sampling settings at a time

GRID: dict[str, tuple[list[Any], list[Any]]] = {   # (good values, bad values)
    "temperature": ([0, 1e-8, 1e-5, 0.5, 1, 2], [-0.1, 2.1, "0", [0]]), "top_p": ([1, 1e-9, 0.5, 0.95], [0, 1.0001]),
    "top_k": ([0, -1, 1, 5, 511, 9_999_999], [-2]), "min_p": ([0, 0.05, 0.2, 1], [-0.1, 1.1]), "repetition_penalty": ([1, 0.5, 1.3, 100], [0, 101]),
    "presence_penalty": ([0, -2, 0.5, 2], [2.1]), "frequency_penalty": ([0, -2, 1.5, 2], [-2.1]), "seed": ([0, 2**64 - 1, -2**63], [2**64, 1.5]),
    "n": ([1, 2, 3, 5], [0, 129])}


def pairs() -> list[dict[str, Any]]:
    values = {k: good + bad for k, (good, bad) in GRID.items()}
    return [{a: x, b: y} for a, b in itertools.combinations(values, 2) for x in values[a] for y in values[b]]


def plain_texts(e: Any, body: dict[str, Any], known: dict[str, list[str]]) -> list[str] | None:
    "What an engine that runs the request alone, without a prefix cache, says; None if chance decides."
    kw = {"temperature": 1.0, "top_p": 1.0, "top_k": 0} | {k: v for k, v in body.items() if k in GRID}
    if kw["temperature"] >= 1e-4 and "seed" not in kw: return None
    if (key := json.dumps(kw)) not in known:
        r = e.run(prompt_token_ids=body["prompt"], max_new_tokens=body["max_tokens"], **kw)
        known[key] = [o.text for o in r.outputs]
    return known[key]


@family("I3", "Pairs of sampling settings", goal=1200, sample=80)
def sampling_pairs(seed: int, count: int, c: Counted) -> None:
    cases = pairs()
    cases = random.Random(seed).sample(cases * -(-count // len(cases)), count)
    known: dict[str, list[str]] = {}
    with all_closed(), attacked(c, max_num_seqs=8) as s, ThreadPoolExecutor(3) as pool:
        alone = tiny_engine(prefix_cache=False, max_model_len=64, dtype="float32")
        def one(case: dict[str, Any]) -> tuple[dict[str, Any], Any]:
            body = {"prompt": [7, 8, 9], "max_tokens": 5, "temperature": 1.0, **case}
            try: return body, ask(s, "/v1/completions", body)
            except Exception as e: return body, e
        for case, (body, got) in zip(cases, pool.map(one, cases)):
            with c.case(case):
                if isinstance(got, Exception): raise got
                bad = [k for k, v in case.items() if v in GRID[k][1]]
                if bad: refused(got, *bad)
                else:
                    assert got[0] == 200, got
                    want = plain_texts(alone, body, known)
                    assert want is None or [x["text"] for x in got[1]["choices"]] == want, (got[1]["choices"], want)
                    assert len(got[1]["choices"]) == case.get("n", 1)
    c.notes["compared_with_a_run_alone"] = len(known)


# I4: token ids that are none

V = 512
IDS: list[tuple[Any, bool]] = [(V - 1, True), (0, True), (V, False), (V + 10, False), (-1, False), (-V, False), (2**31 - 1, False), (2**31, False), (2**63, False), (10**30, False),
    (1.5, False), ("abc", False), (None, False), ([], False), ({}, False), ("", False)]
BIASES: list[tuple[Any, bool]] = [(100, True), (-100, True), (0, True), (100.5, False), (-101, False), (1e300, False), ("x", False), (None, False), ([1], False), ({}, False)]


def id_cases() -> list[tuple[str, dict[str, Any], bool, str]]:
    "(path, fields, good?, field to blame)"
    out: list[tuple[str, dict[str, Any], bool, str]] = []
    for (i, good), path, before in itertools.product(IDS, bad_http.PATHS, ([], [5, 6])):
        out.append((path, {"stop_token_ids": [*before, i]}, good, "stop_token_ids"))
        if not isinstance(i, (list, dict)) and i != "": out.append((path, {"logit_bias": {**{str(b): 1 for b in before}, str(i): 1}}, good, "logit_bias"))
    out += [(p, {"logit_bias": {"5": v}}, good, "logit_bias") for (v, good), p in itertools.product(BIASES, bad_http.PATHS)]
    for i, good in IDS:
        if not isinstance(i, (list, str)): out += [("/v1/completions", {"prompt": p}, good, "prompt") for p in ([i], [5, i, 6], [[5], [i]])]
        out.append(("/detokenize", {"tokens": [5, i]}, good, "tokens"))
    return out


@family("I4", "Token ids beyond the vocabulary", goal=200, sample=60)
def token_ids(seed: int, count: int, c: Counted) -> None:
    cases = random.Random(seed).sample(id_cases(), count)
    long: dict[str, Any] = {"prompt": [11, 12, 13], "max_tokens": 55, "temperature": 0, "ignore_eos": True}
    with attacked(c) as s, ThreadPoolExecutor(1) as pool:
        want = s.complete(**long)["choices"]
        for block in range(0, len(cases), 10):                       # a neighbour runs all the while
            neighbour = pool.submit(s.complete, **long)
            for path, fields, good, field in cases[block:block + 10]:
                with c.case(f"{path} {fields}"):
                    body = fields if path == "/detokenize" else {**bad_http.base(path), **fields}
                    got = ask(s, path, body)
                    if good: assert got[0] == 200, got
                    else: refused(got, field)
            if neighbour.result()["choices"] != want: c.spoil("the neighbour's text changed", 10)


# I5: lengths around every edge

POOLS = [dict(block=16, chunk=32, limit=96, K=1), dict(block=4, chunk=16, limit=64, K=1), dict(block=8, chunk=12, limit=48, K=4)]


def lengths(p: dict[str, int]) -> list[int]:
    b, k, n = p["block"], p["chunk"], p["limit"]
    return sorted({0, 1, 2, b - 1, b, b + 1, 2 * b - 1, 2 * b, 2 * b + 1, k - 1, k, k + 1, n - 2, n - 1, n, n + 1})


@family("I5", "Lengths around every edge", goal=300, sample=60)
def edges(seed: int, count: int, c: Counted) -> None:
    groups = [(p, n, m, stream) for p in range(len(POOLS)) for n in lengths(POOLS[p]) for m in (0, 1, 2) for stream in (False, True)]
    groups = random.Random(seed).sample(groups, -(-count // 2))
    for k, p in enumerate(POOLS):
        with all_closed(), serving(tiny_engine(block=p["block"], max_num_batched_tokens=p["chunk"], max_model_len=p["limit"], window_steps=p["K"])) as s:
            for number, (_, n, m, stream) in enumerate(g for g in groups if g[0] == k):
                prompt = [3 + number % 500, *(20 + (i * 7 + number) % 400 for i in range(n - 1))] if n else []
                for again in range(2):
                    if c.tried == count: break
                    with c.case(f"{p} length {n} max_tokens {m} stream {stream} again {again}"): length_case(s, p, prompt, m, stream, bool(again))
            s.settle()


def length_case(s: Server, p: dict[str, int], prompt: list[int], m: int, stream: bool, again: bool) -> None:
    n, body = len(prompt), {"prompt": prompt, "max_tokens": m, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    if not stream or not 0 < n < p["limit"]:
        del body["stream_options"]
        status, got = ask(s, "/v1/completions", body)
        if not 0 < n < p["limit"]:
            assert status == 400, (status, got)
            return refused((status, got), "prompt")
        ids, usage, reason = got["choices"][0]["token_ids"], got["usage"], got["choices"][0]["finish_reason"]
    else:
        events = s.events("/v1/completions", **body)
        usage, said = events[-1]["usage"], [e["choices"][0] for e in events if e["choices"]]
        ids, reason = sum((x["token_ids"] for x in said), []), said[-1]["finish_reason"]
    made = min(m, p["limit"] - n)
    cached = (n - 1) // p["block"] * p["block"] if again and m else 0      # without output nothing is computed, so nothing is looked up
    assert (len(ids), usage["completion_tokens"], usage["prompt_tokens"], reason) == (made, made, n, "length"), (len(ids), usage, reason)
    assert usage["prompt_tokens_details"]["cached_tokens"] == cached, (usage, cached)
    assert ids == oracle(prompt, made), (ids, oracle(prompt, made))

