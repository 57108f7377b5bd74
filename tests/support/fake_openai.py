"""A server that speaks the OpenAI protocol and has no model: what the page and the clients see when a script answers them."""
from __future__ import annotations
import json, threading, time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Iterator

PAGE = Path(__file__).resolve().parents[2] / "llminfer" / "static" / "chat.html"


class Fake:
    "What the server says and what it was asked. `answer` maps a prompt to pieces of text; an exception in it is an error in mid-stream."
    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.answer: Any = lambda prompt: (f"You said: {prompt}",)
        self.delay, self.status, self.key, self.message = 0.0, 200, "", "the server says no"
        self.open, self.most, self.broken, self.finish, self.cached = 0, 0, 0, "stop", 0
        self.lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    protocol_version, fake = "HTTP/1.1", Fake()

    def log_message(self, *args: Any) -> None: pass

    def reply(self, body: bytes, kind: str = "application/json", status: int = 200) -> None:
        self.send_response(status)
        for k, v in (("Content-Type", kind), ("Content-Length", str(len(body)))): self.send_header(k, v)
        self.end_headers()
        self.wfile.write(body)

    def refused(self) -> bool:
        f = self.fake
        f.keys.append(self.headers.get("Authorization"))
        status = 401 if f.key and self.headers.get("Authorization") != f"Bearer {f.key}" else f.status
        if status != 200: self.reply(json.dumps({"error": {"message": f.message, "type": "x", "param": None, "code": "x"}}).encode(), status=status)
        return status != 200

    def do_GET(self) -> None:
        if self.path == "/": self.reply(PAGE.read_bytes(), "text/html; charset=utf-8")
        elif self.path == "/version": self.reply(b'{"version": "0.1.0"}')
        elif self.path != "/v1/models": self.reply(b"{}", status=404)
        elif not self.refused(): self.reply(json.dumps({"object": "list", "data": [{"id": "fake", "object": "model", "owned_by": "llminfer", "max_model_len": 8192}]}).encode())

    def do_POST(self) -> None:
        f, body = self.fake, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.refused(): return
        with f.lock: f.requests.append(body); f.open += 1; f.most = max(f.most, f.open)
        self.send_response(200)
        for k, v in (("Content-Type", "text/event-stream"), ("Connection", "close")): self.send_header(k, v)
        self.end_headers()
        n = 0
        def frame(d: Any) -> None: self.wfile.write(f"data: {d if isinstance(d, str) else json.dumps(d)}\n\n".encode()); self.wfile.flush()
        def usage() -> dict[str, Any]: return {"prompt_tokens": 10, "completion_tokens": n, "total_tokens": 10 + n, "prompt_tokens_details": {"cached_tokens": f.cached}}
        try:
            frame({"choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]})
            self.wfile.write(b": keep-alive\n\n")
            for piece in f.answer(body["messages"][-1]["content"]):
                time.sleep(f.delay)
                n += 2                       # two tokens a piece: who counts pieces gets another number
                frame({"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}], "usage": usage()})
            frame({"choices": [{"index": 0, "delta": {}, "finish_reason": f.finish}]})
            frame({"choices": [], "usage": usage()})
        except OSError: f.broken += 1
        except Exception as e: frame({"error": {"message": str(e), "type": "server_error", "param": None, "code": None}})
        with f.lock: f.open -= 1
        self.close_connection = True
        if not f.broken: frame("[DONE]")


@contextmanager
def fake_openai() -> Iterator[tuple[str, Fake]]:
    "Address and script of a running fake server."
    fake = Fake()
    server = type("S", (ThreadingHTTPServer,), {"request_queue_size": 64, "daemon_threads": True})(("127.0.0.1", 0), type("H", (Handler,), {"fake": fake}))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try: yield f"http://127.0.0.1:{server.server_port}", fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
