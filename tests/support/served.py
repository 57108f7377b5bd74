"""`llminfer serve` in a process of its own."""
from __future__ import annotations
import json, os, signal, subprocess, sys, threading, urllib.error, urllib.request
from contextlib import contextmanager
from typing import Any, Iterator
from house import ROOT

ENV = {k: v for k, v in os.environ.items() if k != "LLMINFER_API_KEY"} | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def popen(*args: Any, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "llminfer.cli", "serve", *map(str, args)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=ENV | (env or {}),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))


class Served:
    "A server that runs: its address, what it printed until it was ready, and all of its standard error."
    def __init__(self, p: subprocess.Popen[str]):
        self.p, self.lines, self.err = p, list[str](), list[str]()
        assert p.stdout and p.stderr
        self.reader = threading.Thread(target=lambda: self.err.extend(p.stderr), daemon=True)  # type: ignore[arg-type]
        self.reader.start()
        while not (self.lines and (self.lines[-1].startswith("Ready") or '"ready"' in self.lines[-1])):
            line = p.stdout.readline()
            assert line, (self.lines, self.err)
            self.lines.append(line.rstrip("\n"))
        first = self.lines[0]
        self.model = json.loads(first)["model"] if first.startswith("{") else first.split("model=")[1].split(" backend=")[0]
        self.url = json.loads(first)["url"] if first.startswith("{") else first.rpartition(" ")[2]

    def ask(self, path: str, body: Any = None, timeout: float = 30, **headers: str) -> tuple[int, Any, dict[str, str]]:
        "Status, JSON or text, headers."
        data = None if body is None else json.dumps(body).encode()
        r = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}})
        try:
            with urllib.request.urlopen(r, timeout=timeout) as a: status, text, head = a.status, a.read().decode(), dict(a.headers)
        except urllib.error.HTTPError as e: status, text, head = e.code, e.read().decode(), dict(e.headers)
        try: return status, json.loads(text), head
        except ValueError: return status, text, head

    def stream(self, **body: Any) -> Iterator[str]:
        "The data of each event of a chat."
        data = json.dumps({"model": self.model, "messages": [{"role": "user", "content": "hi"}], "stream": True, "ignore_eos": True, "temperature": 0, **body}).encode()
        with urllib.request.urlopen(urllib.request.Request(self.url + "/v1/chat/completions", data, {"Content-Type": "application/json"}), timeout=60) as r:
            for line in r:
                if line.startswith(b"data: "): yield line[6:].decode().rstrip("\n")

    def end(self, sig: int = signal.SIGTERM, seconds: float = 30) -> int:
        self.p.send_signal(sig)
        code = self.p.wait(seconds)
        self.reader.join(5)
        return code


@contextmanager
def served(*args: Any, env: dict[str, str] | None = None) -> Iterator[Served]:
    p = popen("--port", 0, "--log-level", "warning", *args, env=env)
    try: yield Served(p)
    finally:
        if p.poll() is None: p.kill()
        p.wait(10)
        for f in (p.stdout, p.stderr):
            if f: f.close()
