"""Bad inputs for the server, by family of the bug log's section 3.2; seeded, so a find can be repeated. No 500, no hang over 5 s."""
from __future__ import annotations
import json, random, time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator
import httpx2
from support.api import http_bytes, raw_request

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
LIMIT_S = 5.0


@dataclass
class Report:
    family: str
    n: int = 0
    codes: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


@dataclass
class Case:
    "A request, and what its answer must be: `param` names the field that must be blamed."
    path: str
    body: bytes
    allowed: tuple[int, ...]
    param: str | None = None
    raw: bytes | None = None


def attack(port: int, family: str, n: int, seed: int = 0, workers: int = 4) -> Report:
    "Send n cases of a family; faults hold what went wrong."
    r = Report(family)
    with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http, ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(lambda c: judge(port, http, c, r), FAMILIES[family](random.Random(seed), n)): pass
    return r


def judge(port: int, http: httpx2.Client, c: Case, r: Report) -> None:
    t = time.monotonic()
    if c.raw is not None:
        out = raw_request(port, c.raw, LIMIT_S + 1)
        status, text = int(out[9:12]) if out[:5] == b"HTTP/" else 0, out.decode("utf-8", "replace")
    else:
        a = http.post(c.path, content=c.body, headers={"content-type": "application/json"})
        status, text = a.status_code, a.text
    seconds = time.monotonic() - t
    r.n, r.slowest_s = r.n + 1, max(r.slowest_s, seconds)
    r.codes[status] += 1
    told = f"{status} {c.path} {(c.raw or c.body)[:200]!r}: {text[:300]}"
    if status >= 500 or status not in c.allowed: r.faults.append(f"status {told}")
    elif seconds > LIMIT_S: r.faults.append(f"{seconds:.1f} s: {told}")
    elif 400 <= status < 500 and c.raw is None:
        e = json.loads(text)["error"]
        if set(e) != {"message", "type", "param", "code"} or not e["message"]: r.faults.append(f"shape {told}")
        if c.param is not None and not str(e["param"]).startswith(c.param): r.faults.append(f"blames {e['param']}, not {c.param}: {told}")


def base(path: str, **more: Any) -> dict[str, Any]:
    "A valid body."
    key = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/responses": "input"}[path]
    limit = "max_output_tokens" if key == "input" else "max_tokens"
    return {key: [{"role": "user", "content": "hi"}] if key != "prompt" else "hi", limit: 1, **more}


# I1: broken JSON and bytes

def valid_bodies() -> list[tuple[str, bytes]]:
    more: list[dict[str, Any]] = [{}, {"stop": ["a", "b"]}, {"seed": 5, "temperature": 0.5}, {"logit_bias": {"5": 1.5}}, {"stream": True}, {"user": "Zoë 🤗"}, {"metadata": {"a": "b"}}]
    return [(p, json.dumps(base(p, **m), ensure_ascii=False).encode()) for p in PATHS for m in more]


BYTES = [b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\xc3(", b"\xed\xa0\x80", b'"\\ud800"', b"\\u0000", b"[" * 3000, b'{"a":' * 3000, b"NaN", b"1e99999", b"9" * 5000, b'"', b"\\", b",", b"}", b"]", b":", b"\n\r", b"\xf0\x9f"]


def malformed(rng: random.Random, n: int) -> Iterator[Case]:
    bodies = valid_bodies()
    for _ in range(n):
        path, b = rng.choice(bodies)
        for _ in range(rng.choice((1, 1, 2, 4))):
            i, j = sorted((rng.randrange(len(b) + 1), rng.randrange(len(b) + 1)))
            match rng.randrange(7):
                case 0: b = b[:i]
                case 1: b = b[:i] + rng.choice(BYTES) + b[i:]
                case 2: b = b[:i] + b[j:]
                case 3: b = b[:i] + b[i:j] + b[i:]
                case 4: b = b[:i] + bytes([rng.randrange(256)]) + b[i + 1:]
                case 5: b = b[:-1] + b"," + b[1:] if len(b) > 2 else b        # every key twice
                case _: b = rng.choice(BYTES) + b + rng.choice(BYTES)
        yield Case(path, b, (200, 400, 404, 413))


# I2: a wrong type or range in every field

VALUES: list[Any] = [None, True, 0, -1, 1.5, 10**30, 2**63, "", "x", "5", [], {}, [None], [[1]], {"a": 1}, -1.5, 1e300]
Rule = Callable[[Any], bool]


def number(lo: float, hi: float, open_lo: bool = False) -> Rule:
    return lambda v: isinstance(v, (int, float)) and not isinstance(v, bool) and (lo < v if open_lo else lo <= v) and v <= hi


def integer(lo: int, hi: int) -> Rule: return lambda v: isinstance(v, int) and not isinstance(v, bool) and lo <= v <= hi


def boolean(v: Any) -> bool: return isinstance(v, bool)
def strings(v: Any) -> bool: return isinstance(v, str) or isinstance(v, list) and all(isinstance(x, str) for x in v)
def empty_list(v: Any) -> bool: return v == [] and isinstance(v, list)
def empty_dict(v: Any) -> bool: return v == {} and isinstance(v, dict)


BIG = 2**31 - 1
SHARED: dict[str, Rule] = {"temperature": number(0, 2), "top_p": number(0, 1, True), "top_k": integer(-1, 2**62), "min_p": number(0, 1), "repetition_penalty": number(0, 100, True),
    "presence_penalty": number(-2, 2), "frequency_penalty": number(-2, 2), "no_repeat_ngram_size": integer(0, 2**20), "seed": integer(-2**63, 2**64 - 1), "stop": strings,
    "stop_token_ids": empty_list, "min_tokens": integer(0, 1), "ignore_eos": boolean, "logit_bias": empty_dict, "bad_words": empty_list, "include_stop_str_in_output": boolean,
    "skip_special_tokens": boolean, "stream": lambda v: v is None, "cache_salt": lambda v: isinstance(v, str) and bool(v), "priority": integer(-2**31, BIG),
    "deadline_s": number(0, 1e6, True), "model": lambda v: False, "user": lambda v: isinstance(v, str)}
OWN: dict[str, dict[str, Rule]] = {
    "/v1/chat/completions": {"messages": lambda v: False, "max_tokens": integer(0, BIG), "max_completion_tokens": integer(0, BIG), "n": integer(1, 1), "logprobs": boolean,
        "prompt_logprobs": integer(0, 20), "tools": empty_list, "chat_template_kwargs": lambda v: isinstance(v, dict), "continue_final_message": lambda v: False,
        "add_generation_prompt": boolean, "documents": empty_list, "metadata": lambda v: isinstance(v, dict), "request_id": lambda v: isinstance(v, str) and bool(v), "return_token_ids": boolean},
    "/v1/completions": {"prompt": lambda v: isinstance(v, str) and v != "" or v == [[1]], "max_tokens": integer(0, BIG), "n": integer(1, 1), "logprobs": integer(0, 20), "echo": boolean,
        "add_special_tokens": boolean, "timings": boolean},
    "/v1/responses": {"input": lambda v: isinstance(v, str) and v != "", "max_output_tokens": integer(0, BIG), "instructions": lambda v: isinstance(v, str), "tools": empty_list,
        "include": empty_list, "top_logprobs": integer(0, 20), "parallel_tool_calls": boolean, "reasoning": lambda v: isinstance(v, dict)}}
MAY: dict[str, tuple[int, ...]] = {"model": (400, 404), "deadline_s": (200, 400, 408), "continue_final_message": (200, 400), "input": (200, 400), "stream": (200, 400), "skip_special_tokens": (200, 400)}


def wrong_types(rng: random.Random, n: int) -> Iterator[Case]:
    cases = []
    for path, own in OWN.items():
        for name, ok in (SHARED | own).items():
            for v in VALUES:
                required = name in ("messages", "prompt", "input")
                good = not required if v is None else ok(v)
                allowed = MAY.get(name, (200,) if good else (400,)) if v is not None or required else (200,)
                cases.append(Case(path, json.dumps({**base(path), name: v}).encode(), allowed, None if good or name == "stream" else name))
    return iter(rng.sample(cases, min(n, len(cases))))


# I8: shapes of chats

TEXTS = ["hi", "", " ", "\x00", "a" * 50, "<|im_end|>\n<|im_start|>system\n", "\u2028\u2029\x85", "👩‍👩‍👧🇪🇺", "ا" * 20, "{{ 7*7 }}{% raw %}", "</s><tool_call>"]


def chat_shapes(rng: random.Random, n: int) -> Iterator[Case]:
    roles = ["user", "assistant", "system", "developer", "tool", "function", "robot", "", None, 5, ["user"]]
    def content() -> Any:
        return rng.choice([*TEXTS, None, 5, [], {}, [None], ["x"], [{"type": "text", "text": rng.choice(TEXTS)}], [{"type": "text"}], [{"type": "image_url", "image_url": {"url": "x"}}],
            [{"type": "input_audio"}], [{"type": "text", "text": 5}], [{"type": "text", "text": "a"}] * 20])
    def message() -> Any:
        m: dict[str, Any] = {"role": rng.choice(roles[:6] if rng.random() < 0.8 else roles), "content": content()}
        if rng.random() < 0.3: m["tool_calls"] = rng.choice([[], None, [{}], [{"id": "c", "type": "function", "function": {"name": "f", "arguments": rng.choice(["{}", "{", "[]", {"a": 1}, None])}}], "x"])
        if rng.random() < 0.2: m[rng.choice(["name", "tool_call_id", "reasoning_content", "refusal", "function_call", "extra"])] = rng.choice(["x", None, 5, {}])
        return m if rng.random() < 0.95 else rng.choice(["x", None, 5, []])
    for _ in range(n):
        k = rng.choice([0, 1, 1, 1, 2, 3, 1000])
        body = {"messages": [message() for _ in range(k)], "max_tokens": 1}
        if rng.random() < 0.2: body[rng.choice(["tools", "tool_choice", "chat_template_kwargs", "continue_final_message"])] = rng.choice([None, [], {}, "auto", True, {"x": "<|im_end|>"}, {"messages": []}])
        yield Case("/v1/chat/completions", json.dumps(body).encode(), (200, 400))


# I9: headers and methods

def odd_requests(rng: random.Random, n: int) -> Iterator[Case]:
    body = json.dumps(base("/v1/completions")).encode()
    def one() -> bytes:
        p = rng.choice(PATHS[:2])
        match rng.randrange(14):
            case 0: return http_bytes(p, body, headers={"content-type": rng.choice(["text/plain", "x", "application/xml", "multipart/form-data; boundary=x", "application/json5"])})
            case 1: return http_bytes(p, b"", headers={"content-length": "0"})
            case 2: return f"POST {p} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode()
            case 3: return http_bytes(p, body, headers={"x-long": "y" * 65536})
            case 4: return http_bytes(p, b"", method=rng.choice(["GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "BREW"]))
            case 5: return http_bytes("/v1/" + rng.choice(["../etc/passwd", "%00", "models/%2e%2e", "chat/completions/", "nothing?x=" + "y" * 3000, "é".encode().decode("latin-1")]), body)
            case 6: return http_bytes(p, body, headers={"content-length": rng.choice(["-1", "x", "1e3", "99999999999", "5, 5"])})
            case 7: return http_bytes(p, body, headers={"transfer-encoding": rng.choice(["gzip", "chunked, chunked", "x"])})
            case 8: return b"POST " + p.encode() + b" HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\nzz\r\n{}\r\n0\r\n\r\n"
            case 9: return rng.choice([b"\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"POST / HTTP/9.9\r\nconnection: close\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
            case 10: return http_bytes(p, b"{", headers={"authorization": rng.choice(["Bearer", "Bearer \xff", "x" * 8000, "Basic YTpi"])})
            case 11: return http_bytes(p, b"{", headers={"x-request-id": rng.choice(["x" * 10000, "a b", "\xff\xfe", ""])})
            case 12: return http_bytes(p, body * 2, headers={"content-length": str(len(body) + 3)})
            case _: return http_bytes(p, b"{}", headers={"content-encoding": "gzip"})
    for _ in range(n):
        raw = one()
        yield Case("raw", b"", (400, 401, 404, 405, 408, 411, 413, 414, 415, 431, 200 if raw[:4] in (b"OPTI", b"HEAD") else 400), raw=raw)


FAMILIES: dict[str, Callable[[random.Random, int], Iterator[Case]]] = {"I1": malformed, "I2": wrong_types, "I8": chat_shapes, "I9": odd_requests}
