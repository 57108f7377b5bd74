"""Servers for the upstream backend: our own around a tiny model, and one that answers by a script and misbehaves on demand."""
from __future__ import annotations
import json, socket, threading, time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Iterator


@contextmanager
def our_server(model: str) -> Iterator[str]:
    "Address of `llminfer serve`'s app in a thread."
    import uvicorn
    from llminfer.api import create_openai_app
    from llminfer.config import CacheConfig, EngineConfig
    from llminfer.engine import InferenceEngine
    e = InferenceEngine(EngineConfig(model_name=model, max_model_len=160, seed=0, cache=CacheConfig(num_blocks=120)))
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(create_openai_app(e), log_level="warning", lifespan="on"))
    thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
    thread.start()
    end = time.monotonic() + 20
    while not server.started and time.monotonic() < end: time.sleep(0.01)
    try: yield f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join(20)
        e.unload()


class Script:
    "What the server saw, and which models it has."
    def __init__(self) -> None: self.bodies, self.keys, self.models, self.gone, self.open, self.most, self.lock = list[Any](), list[Any](), ["some-model"], 0, 0, 0, threading.Lock()

    def wait_gone(self, n: int, seconds: float = 5.0) -> bool:
        end = time.monotonic() + seconds
        while self.gone < n and time.monotonic() < end: time.sleep(0.01)
        return self.gone >= n


class Handler(BaseHTTPRequestHandler):
    script = Script()
    def log_message(self, *args: Any) -> None: pass

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None: self.answer(200, json.dumps({"data": [{"id": m} for m in self.script.models]}).encode())

    def do_POST(self) -> None:
        s, body = self.script, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        s.bodies.append(body)
        s.keys.append(self.headers.get("Authorization"))
        what, _, text = body["prompt"].partition(" ")
        if what == "status": return self.answer(429, b'{"error": {"message": "slow down", "code": "x"}}')
        if what == "html": return self.answer(502, b"<html>")
        with s.lock: s.open += 1; s.most = max(s.most, s.open)
        try:
            self.answer(200, b": hello\n\n")
            for i, letter in enumerate(text):
                self.event({"choices": [{"index": 0, "text": letter, "finish_reason": None}]})
                if what == "slow": time.sleep(0.1)
                if what == "pause": time.sleep(0.3)
                if what == "error" and i: return self.event({"error": {"message": "the GPU is gone"}})
                if what == "junk": self.wfile.write(b"data: {{{\n\n")
                if what == "cut" and i: return
            self.event({"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]})
            self.event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 42, "prompt_tokens_details": {"cached_tokens": 3}}})
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError: s.gone += 1
        finally:
            with s.lock: s.open -= 1

    def event(self, d: Any) -> None:
        self.wfile.write(f"data: {json.dumps(d)}\n\n".encode())
        self.wfile.flush()


@contextmanager
def script_server() -> Iterator[tuple[str, Script]]:
    script = Script()
    server = type("S", (ThreadingHTTPServer,), {"request_queue_size": 64, "daemon_threads": True})(("127.0.0.1", 0), type("H", (Handler,), {"script": script}))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try: yield f"http://127.0.0.1:{server.server_port}/v1", script
    finally:
        server.shutdown()
        server.server_close()
