"""What HTTP costs a token: CPU time of the serving process, streaming over real sockets, against the same engine without a server.

python benchmarks/http_cost.py [--model forced|demo] [--streams 1 8 32] [--tokens 400] [--json FILE]

`forced`: no model, the ids are a script, so what remains is engine, serving and HTTP. `demo`: the demo model on the CPU; the last columns then tell the share
of the engine's speed that HTTP takes. CPU time is that of the process that serves (the client is another one), apart for the thread of the event loop: there
the server does its work, beside the engine's own thread."""
from __future__ import annotations
import argparse, asyncio, json, os, platform, socket, subprocess, sys, threading, time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]


def make_engine(kind: str) -> Any:
    "An engine, and the prompt to ask it."
    import torch
    from llminfer.backends import PagedEngine
    from llminfer.config import EngineConfig
    from llminfer.engine import InferenceEngine
    torch.set_num_threads(1)
    if kind == "demo": return InferenceEngine(EngineConfig("demo", device="cpu", max_num_seqs=64, max_model_len=1024, num_threads=1)).load()
    from tempfile import mkdtemp
    from llminfer.loading import make_tiny, open_checkpoint
    from llminfer.model import ForcedModel
    from llminfer.tokenization import load_tokenizer
    folder = make_tiny(Path(mkdtemp()) / "tiny")
    tok = load_tokenizer(open_checkpoint(folder).tokenizer)
    e = InferenceEngine(EngineConfig(str(folder), device="cpu", max_num_seqs=64, max_model_len=1024))
    assert isinstance(e.backend, PagedEngine)
    word = tok.encode(" the", add_special_tokens=False)[0]
    e.backend.start(ForcedModel({}, vocab_size=tok.vocab_size, default=word), tok)
    return e


def serve(kind: str, loop: str) -> None:
    "Child: serve, print the port, end when standard input closes."
    import uvicorn
    from llminfer.api import create_openai_app
    from llminfer.serving import ServingLimits
    app = create_openai_app(make_engine(kind), served_model_name="m", limits=ServingLimits(max_queued_requests=4096))
    s = socket.socket()
    s.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", loop=loop, access_log=False))
    def watch() -> None:
        sys.stdin.read()
        server.should_exit = True
    threading.Thread(target=watch, daemon=True).start()
    print(s.getsockname()[1], flush=True)
    server.run(sockets=[s])


async def stream_http(port: int, n_tokens: int) -> int:
    "Read one stream from a socket; returns its events."
    r, w = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": n_tokens, "ignore_eos": True, "temperature": 0}).encode()
    w.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    n = 0
    while data := await r.read(1 << 16): n += data.count(b"data: {")
    w.close()
    return n


def cpu_us(pid: int) -> tuple[float, float]:
    "CPU microseconds of a process so far: (of its main thread, where the event loop runs; of all threads)."
    each = {int(t.name): int((t / "schedstat").read_text().split()[0]) / 1e3 for t in Path(f"/proc/{pid}/task").iterdir()}
    return each[pid], sum(each.values())


def per_token(before: tuple[float, float], pid: int, n: int, seconds: float) -> dict[str, float]:
    loop, total = cpu_us(pid)
    return {"loop_us": (loop - before[0]) / n, "cpu_us": (total - before[1]) / n, "tok_s": n / seconds}


def over_http(kind: str, streams: list[int], n_tokens: int, loop: str) -> dict[int, dict[str, float]]:
    child = subprocess.Popen([sys.executable, __file__, "--serve", kind, "--loop", loop], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin and child.stdout
    port, out = int(child.stdout.readline()), {}
    async def run(n: int) -> None: await asyncio.gather(*(stream_http(port, n_tokens) for _ in range(n)))
    for _ in range(200):
        try: asyncio.run(run(1)); break
        except OSError: time.sleep(0.1)
    for n in streams:
        t, c = time.perf_counter(), cpu_us(child.pid)
        asyncio.run(run(n))
        out[n] = per_token(c, child.pid, n * n_tokens, time.perf_counter() - t)
    child.stdin.close()
    child.wait(30)
    return out


def in_process(kind: str, streams: list[int], n_tokens: int) -> dict[int, dict[str, float]]:
    "The same requests through the engine's own streams."
    from llminfer.request import GenerationRequest
    from llminfer.serving import AsyncEngine
    out = {}
    async def main() -> None:
        e = AsyncEngine(make_engine(kind))
        await e.start()
        ids = e.tokenizer.encode_chat([{"role": "user", "content": "hi"}])
        async def one(n: int) -> None:
            async with await e.open(GenerationRequest(prompt_token_ids=ids, max_new_tokens=n, ignore_eos=True, temperature=0, stream=True)) as s:
                while await s.take(): pass
        await one(20)
        for n in streams:
            t, c = time.perf_counter(), cpu_us(os.getpid())
            await asyncio.gather(*(one(n_tokens) for _ in range(n)))
            out[n] = per_token(c, os.getpid(), n * n_tokens, time.perf_counter() - t)
        await e.stop(0)
    asyncio.run(main())
    return out


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", choices=["forced", "demo"], default="forced")
    p.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    p.add_argument("--tokens", type=int, default=400)
    p.add_argument("--loop", default="auto", help="uvicorn's event loop: auto, asyncio, uvloop")
    p.add_argument("--json", type=Path)
    p.add_argument("--serve", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.serve: return serve(a.serve, a.loop)
    inside, outside = in_process(a.model, a.streams, a.tokens), over_http(a.model, a.streams, a.tokens, a.loop)
    print(f"{'streams':>8} {'loop us/token, engine':>22} {'with HTTP':>10} {'HTTP':>6} {'all us/token, engine':>21} {'with HTTP':>10} {'tok/s, engine':>14} {'with HTTP':>10}")
    rows = []
    for n in a.streams:
        e, h = inside[n], outside[n]
        rows.append({"streams": n, **{f"engine_{k}": round(v, 1) for k, v in e.items()}, **{f"server_{k}": round(v, 1) for k, v in h.items()},
            "http_us": round(h["loop_us"] - e["loop_us"], 1), "cpu_share": round(e["cpu_us"] / h["cpu_us"], 3)})
        print(f"{n:>8} {e['loop_us']:>22.1f} {h['loop_us']:>10.1f} {rows[-1]['http_us']:>6} {e['cpu_us']:>21.1f} {h['cpu_us']:>10.1f} {e['tok_s']:>14.0f} {h['tok_s']:>10.0f}")
    if a.json: a.json.write_text(json.dumps({"benchmark": "http_cost", "model": a.model, "tokens": a.tokens, "python": platform.python_version(), "cpu": platform.processor() or platform.machine(), "rows": rows}, indent=1))


if __name__ == "__main__": main()
