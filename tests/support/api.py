"""Servers over real HTTP: an app in uvicorn, in a thread, on a free port; and a reader of raw bytes."""
from __future__ import annotations
import json, socket, threading, time
from contextlib import contextmanager
from typing import Any, Iterator
import httpx2
import uvicorn
from llminfer.api import create_openai_app
from llminfer.config import CacheConfig, EngineConfig
from llminfer.engine import InferenceEngine
from llminfer.serving import ServingLimits
from support.engines import CACHE, tiny

KEY = "test-key"


class Server:
    "An app that serves on a free port until `close`."
    def __init__(self, app: Any):
        self.app, self.sock = app, socket.socket()
        self.sock.bind(("127.0.0.1", 0))
        self.port = self.sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.uvicorn = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=5))
        self.thread = threading.Thread(target=self.uvicorn.run, kwargs={"sockets": [self.sock]}, daemon=True)
        self.thread.start()
        end = time.monotonic() + 60
        while not self.uvicorn.started:
            assert self.thread.is_alive() and time.monotonic() < end, "the server did not start"
            time.sleep(0.005)
        self.http = httpx2.Client(base_url=self.url, timeout=60)

    @property
    def engine(self) -> Any: return self.app.state.engine

    def post(self, path: str, **body: Any) -> httpx2.Response: return self.http.post(path, json=body)

    def complete(self, **body: Any) -> dict[str, Any]:
        r = self.post("/v1/completions", **body)
        assert r.status_code == 200, r.text
        return r.json()

    def chat(self, *contents: str, **body: Any) -> dict[str, Any]:
        r = self.post("/v1/chat/completions", messages=[{"role": "user", "content": c} for c in contents or ("hi",)], **body)
        assert r.status_code == 200, r.text
        return r.json()

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        "The JSON of every event of a stream; the framing is checked."
        return [json.loads(d) for d in self.data(path, **body) if d != "[DONE]"]

    def data(self, path: str, **body: Any) -> list[str]:
        with self.http.stream("POST", path, json={"stream": True, **body}) as r:
            raw = b"".join(r.iter_raw())
            assert r.status_code == 200 and r.headers["content-type"].startswith("text/event-stream"), (r.status_code, raw[:300])
        return frames(raw)

    def settle(self, seconds: float = 10.0) -> None:
        "Wait until nothing runs; then no block may be held."
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            s = self.engine.stats()
            if not s["open"] and not s["running"] and not s["waiting"] and not s["kv_blocks"]["used"]: return
            time.sleep(0.005)
        raise AssertionError(f"still busy after {seconds} s: {self.engine.stats()}")

    def close(self) -> None:
        self.http.close()
        self.uvicorn.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive(), "the server did not end"


def frames(raw: bytes) -> list[str]:
    "Data of the events of a whole stream: each frame ends with a blank line and is valid UTF-8; comments are skipped."
    assert raw.endswith(b"\n\n"), raw[-80:]
    out = []
    for frame in raw.split(b"\n\n")[:-1]:
        lines = frame.decode("utf-8").split("\n")
        assert all(x.startswith(("data: ", "event: ", ":")) for x in lines), frame
        if data := [x[6:] for x in lines if x.startswith("data: ")]: out.append("\n".join(data))
    return out


@contextmanager
def serving(engine: InferenceEngine, **kw: Any) -> Iterator[Server]:
    "A server around an engine, for the time of a block."
    s = Server(create_openai_app(engine, **kw))
    try: yield s
    finally: s.close()


def tiny_http(limits: ServingLimits | None = None, app: dict[str, Any] | None = None, **cfg: Any) -> Any:
    "A server around a tiny random model in a folder, fp32."
    cache = CacheConfig(**{CACHE[k]: cfg.pop(k) for k in list(cfg) if k in CACHE})
    folder = tiny()[0]
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "seed": 0} | cfg
    return serving(InferenceEngine(EngineConfig(str(folder), device="cpu", cache=cache, **settings)), **{"served_model_name": "tiny", "limits": limits} | (app or {}))


def raw_request(port: int, data: bytes, timeout: float = 5.0) -> bytes:
    "Send bytes, read until the server closes or falls silent."
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as s:
        s.settimeout(timeout)
        s.sendall(data)
        out = b""
        try:
            while part := s.recv(65536): out += part
        except (TimeoutError, ConnectionError): pass
    return out


def http_bytes(path: str, body: bytes, method: str = "POST", headers: dict[str, str] | None = None) -> bytes:
    "An HTTP/1.1 request that asks for the connection to be closed."
    h = {"host": "x", "content-type": "application/json", "content-length": str(len(body)), "connection": "close"} | (headers or {})
    return f"{method} {path} HTTP/1.1\r\n".encode() + b"".join(f"{k}: {v}\r\n".encode() for k, v in h.items()) + b"\r\n" + body
