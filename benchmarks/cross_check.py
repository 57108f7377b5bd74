"""Is our ruler straight? Our load client against guidellm, both ways.

    python -m venv .venv-guidellm && .venv-guidellm/bin/pip install torch guidellm     # once
    python benchmarks/cross_check.py [--lock FILE] [--out benchmarks/records/cross_check.json]

mock    guidellm's mock server, whose times are known: medians and totals of our client, the tails beside them. What the mock itself needs for
        a request, 2 to 5 ms, is in our figures and not in its nominal times, so requests that meet get longer ones
server  one server of ours, loaded by guidellm and by our client in turns: medians against medians. HTTP, scheduler and streams are the real ones;
        its steps take 20 ms and compute nothing, because a model on the CPU that the clients run on would be slowed by the slower client.
        Once one after another, once by the clock, several at a time (a closed loop of several would compare crowds: whose requests happen to
        meet in a step decides the time to the first token, and each client sends its next ones a little differently; for the same reason the
        clock's period is no multiple of a step)

guidellm's `inter_token_latency_ms` is one number a request, what vLLM and we call TPOT. Ends with 1 if a median or a total is more than 5% off.
"""
from __future__ import annotations
import argparse, contextlib, json, os, socket, statistics, subprocess, sys, time, urllib.request
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, Iterator
from cpu_backends import alone
from llminfer.artifacts import environment, to_text, write_file
from llminfer.load_client import LoadResult, LoadSettings, load_metrics, run_load
from llminfer.loading import make_tiny, open_checkpoint
from llminfer.tokenization import Tokenizer, load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
GUIDELLM = ROOT / ".venv-guidellm/bin/guidellm"
ENV = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
KEYS = ("ttft_ms", "tpot_ms", "e2el_ms")
STEP_S = 0.02


@contextlib.contextmanager
def running(argv: list[str], port: int) -> Iterator[str]:
    "A server in a process of its own, ready when it lists its models."
    p = subprocess.Popen(argv, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url, end = f"http://127.0.0.1:{port}/v1", time.monotonic() + 120
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/models", timeout=5).close()
                break
            except OSError:
                if p.poll() is not None or time.monotonic() > end: raise SystemExit(f"error: no server: {' '.join(argv)}") from None
                time.sleep(0.2)
        yield url
    finally:
        p.terminate()
        p.wait(60)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as s: return s.getsockname()[1]


def off(measured: float, true: float) -> float: return measured / true - 1


def against_mock(ttft: float, itl: float, new: int, endpoint: str, concurrency: int, n: int) -> dict[str, Any]:
    "Our client on a server with known times; the true duration is that of full lanes, one after another."
    port = free_port()
    argv = [str(GUIDELLM), "mock-server", "--port", str(port), "--ttft-ms", str(ttft), "--itl-ms", str(itl), "--output-tokens", str(new), "--model", "mock"]
    with running(argv, port) as url: r = run_load(LoadSettings(url, endpoint=endpoint, n_requests=n, output_len=new, input_len=32, max_concurrency=concurrency, n_warmup=2))
    m = r.metrics
    e2e = ttft + (new - 1) * itl
    true = {"median_ttft_ms": ttft, "median_itl_ms": itl, "median_tpot_ms": itl, "median_e2el_ms": e2e, "total_output_tokens": n * new, "duration": e2e * n / concurrency / 1e3}
    tails = {k: m[k] for k in ("p99_ttft_ms", "p99_itl_ms", "p99_e2el_ms")}
    return {"endpoint": endpoint, "concurrency": concurrency, "completed": m["completed"], "requests": n, "true": true, "measured": {k: m[k] for k in true},
        "off": {k: off(m[k], v) for k, v in true.items()}, "tails": tails, "client": r.client}


def by_guidellm(url: str, tokenizer: Path, rate: float | None, n: int, new: int, folder: Path) -> dict[str, list[float]]:
    "Its own times of every request."
    out = folder / "guidellm.json"
    argv = [str(GUIDELLM), "run", "--backend", f"kind=openai_http,target={url.removesuffix('/v1')},model=m,request_format=/v1/completions", "--profile", f"kind=constant,rate={rate:g}" if rate else "kind=concurrent,streams=1",
        "--constraint", f"kind=max_requests,count={n}", "--tokenizer", f"kind=huggingface_auto,model={tokenizer}", "--data", f"kind=synthetic_text,prompt_tokens=64,output_tokens={new}",
        "--output", f"kind=json,path={out}", "--disable-console"]
    p = subprocess.run(argv, env=ENV, cwd=folder, capture_output=True, text=True, timeout=300)
    if p.returncode: raise SystemExit(f"error: guidellm: {p.stderr[-600:]}")
    requests = json.loads(out.read_text())["benchmarks"][0]["requests"]["successful"]
    assert len(requests) == n and all(r["output_tokens"] == new for r in requests), [r.get("output_tokens") for r in requests[:3]]
    return {"ttft_ms": [r["time_to_first_token_ms"] for r in requests], "tpot_ms": [r["inter_token_latency_ms"] for r in requests],
        "e2el_ms": [r["request_latency"] * 1e3 for r in requests]}


def by_us(url: str, tokenizer: Tokenizer, rate: float | None, n: int, new: int, seed: int) -> dict[str, list[float]]:
    how: dict[str, Any] = {"request_rate": rate, "burstiness": 1e6} if rate else {"max_concurrency": 1}
    r: LoadResult = run_load(LoadSettings(url, "m", n_requests=n, output_len=new, input_len=64, seed=seed, **how), tokenizer=tokenizer)
    assert load_metrics(r.requests, r.duration)["completed"] == n, r.errors()
    return {"ttft_ms": [t.ttft * 1e3 for t in r.requests], "tpot_ms": [t.tpot * 1e3 for t in r.requests], "e2el_ms": [t.e2e * 1e3 for t in r.requests]}


def on_one_server(rate: float | None, rounds: int, n: int, new: int, lock: str | None) -> dict[str, Any]:
    "Both clients in turns; medians over all their requests."
    with TemporaryDirectory() as tmp:
        folder = Path(tmp)
        model = make_tiny(folder / "m", seed=1)
        port, tokenizer = free_port(), load_tokenizer(open_checkpoint(model).tokenizer)
        argv = [sys.executable, __file__, "serve", "--model", str(model), "--port", str(port)]
        raw: dict[str, dict[str, list[float]]] = {who: {k: [] for k in KEYS} for who in ("guidellm", "llminfer")}
        with running(argv, port) as url:
            by_us(url, tokenizer, rate, n, new, 99)
            with alone(lock):
                for i in range(rounds):
                    for who in ("guidellm", "llminfer")[::-1 if i % 2 else 1]:
                        got = by_guidellm(url, model, rate, n, new, folder) if who == "guidellm" else by_us(url, tokenizer, rate, n, new, i)
                        for k in KEYS: raw[who][k] += got[k]
    medians = {who: {k: statistics.median(v[k]) for k in KEYS} for who, v in raw.items()}
    return {"load": f"{rate:g} a second" if rate else "one after another", "rounds": rounds, "requests": n, "new_tokens": new, "step_ms": STEP_S * 1e3, "medians": medians,
        "off": {k: off(medians["llminfer"][k], medians["guidellm"][k]) for k in KEYS}, "raw": {who: {k: [round(x, 3) for x in v[k]] for k in KEYS} for who, v in raw.items()}}


def serve(model: str, port: int) -> None:
    "Our server around an engine whose steps take a known time."
    import uvicorn
    from llminfer.api import create_openai_app
    from llminfer.engine_handle import scripted_engine
    engine = scripted_engine(load_tokenizer(open_checkpoint(model).tokenizer), STEP_S, model_name=model, max_model_len=256, max_num_seqs=8)
    uvicorn.run(create_openai_app(engine, served_model_name="m"), host="127.0.0.1", port=port, log_level="error")


def worst(rows: list[dict[str, Any]]) -> float: return max(abs(v) for r in rows for v in r["off"].values())


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("what", nargs="?", choices=["all", "mock", "server", "serve"], default="all", help="serve: the server alone, for a client of yours")
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--lock", help="a file to lock while the server is loaded")
    ap.add_argument("--out", type=Path)
    ap.add_argument("--model", help="of serve: whose tokenizer")
    ap.add_argument("--port", type=int, default=8000, help="of serve")
    a = ap.parse_args()
    if a.what == "serve":
        serve(a.model or str(make_tiny(Path(mkdtemp()) / "m", seed=1)), a.port)
        return 0
    if not GUIDELLM.exists(): raise SystemExit(f"error: {GUIDELLM} does not exist: the head of this script says how to make it")
    kept = json.loads(a.out.read_text()) if a.what != "all" and a.out and a.out.exists() else {}     # half of a record may be measured again
    mock, server = kept.get("mock", []), kept.get("server", [])
    if a.what != "server":
        with alone(a.lock): mock = [against_mock(*x) for x in ((100, 20, 16, "completions", 1, 12), (200, 40, 8, "chat", 4, 32), (200, 40, 8, "completions", 8, 48))]
    if a.what != "mock": server = [on_one_server(rate, a.rounds, n, 32, a.lock) for rate, n in ((None, 16), (4.7, 40))]
    for r in mock + server: print(json.dumps({k: v for k, v in r.items() if k in ("endpoint", "concurrency", "load", "off", "medians", "tails")}))
    version = subprocess.run([str(GUIDELLM), "--version"], capture_output=True, text=True, env=ENV).stdout.strip()
    record = {"kind": "cross_check", "guidellm": version, "environment": environment(), "bound": 0.05, "worst": {"mock": worst(mock) if mock else None,
        "server": worst(server) if server else None}, "mock": mock, "server": server}
    if a.out: write_file(a.out, to_text(record))
    return 1 if worst(mock + server) > 0.05 else 0


if __name__ == "__main__": sys.exit(main())
