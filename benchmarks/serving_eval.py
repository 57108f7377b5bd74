"""Six workloads that users bring to a server, over HTTP, streamed, every row judged: what each of them feels.

    OMP_NUM_THREADS=1 python benchmarks/serving_eval.py [--model demo] [--device cpu] [--dtype auto] [--scale 1] [--only burst siblings] [--out FILE]
    python benchmarks/serving_eval.py --device cuda --dtype bfloat16 --scale 8 --out benchmarks/records/serving_eval_gpu.json     # a GPU

one       a single reader: greedy chats one after another
batch     greedy chats, all at once
sampled   the same with temperature and seeds; then again with fewer at once: the text may not change
burst     readers are being answered when long prompts arrive together; with the usual token budget of a step, and with a small one
siblings  one long beginning, many ends; with the prefix cache and without
pressure  a KV pool with room for all, and one too small: requests are preempted and must say the same

The server is `llminfer serve` in a process of its own, the client `llminfer.load_client`. The first `--judged` requests of each row are judged by the
oracle (`llminfer.gate`); a speed without a believed verdict is no result. `--scale` multiplies the number of requests.
"""
from __future__ import annotations
import argparse, json, os, re, statistics, subprocess, sys, threading, time, urllib.request
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]
from llminfer.artifacts import environment
from llminfer.config import EngineConfig
from llminfer.gate import Gate, unjudged
from llminfer.load_client import LoadResult, LoadSettings, make_prompts, run_load
from llminfer.loading import open_checkpoint
from llminfer.request import SamplingParams
from llminfer.tokenization import Tokenizer, load_tokenizer

SAMPLED = {"temperature": 0.8, "top_p": 0.95, "top_k": 40, "seed": 11}


@contextmanager
def server(a: argparse.Namespace, *more: Any) -> Iterator[str]:
    "`llminfer serve` for the time of a block; its address."
    argv = ["--model", a.model, "--device", a.device, "--dtype", a.dtype, "--port", 0, "--served-model-name", "m", "--log-level", "error", "--json", "--max-model-len", a.max_model_len, *more]
    p = subprocess.Popen([sys.executable, "-m", "llminfer.cli", "serve", *map(str, argv)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert p.stdout
        url = ""
        while (line := p.stdout.readline()):
            event = json.loads(line)
            url = event.get("url") or url
            if event["event"] == "ready": break
        else: raise SystemExit(f"error: the server ended with {p.wait()} before it was ready")
        yield url
    finally:
        p.terminate()
        try: p.wait(60)
        except subprocess.TimeoutExpired: p.kill()
        p.wait()


def counter(url: str, name: str) -> float:
    "The sum of a metric over its labels."
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as r: text = r.read().decode()
    found = re.findall(rf"^llminfer_{name}(?:_total)?(?:\{{[^}}]*\}})? (\S+)$", text, re.M)
    if not found: raise SystemExit(f"error: the server has no metric {name}")
    return sum(map(float, found))


@dataclass
class Load:
    "Prompts, how many new tokens each, how many at once (None: all), sampling fields, and when the first is sent."
    prompts: list[str]
    new: int
    at_once: int | None = None
    body: dict[str, Any] = field(default_factory=dict)
    after_s: float = 0.0


def run(url: str, load: Load, seed: int = 0) -> LoadResult:
    time.sleep(load.after_s)
    extra = {"return_token_ids": True, **load.body}
    s = LoadSettings(f"{url}/v1", "m", "chat", len(load.prompts), max_concurrency=load.at_once, output_len=load.new, seed=seed, extra_body=extra)
    return run_load(s, load.prompts)


def run_beside(url: str, loads: list[Load]) -> list[LoadResult]:
    "Several loads on one server, each from a thread and an event loop of its own."
    out: dict[int, LoadResult] = {}
    jobs = [threading.Thread(target=lambda i=i, x=x: out.update({i: run(url, x)})) for i, x in enumerate(loads)]
    for j in jobs: j.start()
    for j in jobs: j.join()
    return [out[i] for i in range(len(loads))]


class Bench:
    "The rows, and who judges them."
    def __init__(self, a: argparse.Namespace):
        self.a, self.rows = a, list[dict[str, Any]]()
        ckpt = open_checkpoint(a.model)
        self.tok: Tokenizer = load_tokenizer(ckpt.tokenizer)
        a.max_model_len = min(1024, ckpt.config.max_position_embeddings)
        self.gate = Gate(EngineConfig(a.model, device=a.device, dtype=a.dtype))

    def n(self, k: int) -> int: return max(1, round(k * self.a.scale))

    def prompts(self, n: int, tokens: int, seed: int, prefix: int = 0) -> list[str]:
        return make_prompts(n, tokens, 0.25, prefix, seed, self.tok)

    def judged(self, load: Load, r: LoadResult) -> dict[str, Any]:
        "The gate's word on the first requests that succeeded."
        kept = [(p, t) for p, t in zip(load.prompts, r.requests) if not t.error][:self.a.judged]
        if not kept: return unjudged("no request succeeded, or none was to be judged").to_dict()
        ids = [self.tok.encode_chat([{"role": "user", "content": p}]) for p, _ in kept]
        params = [SamplingParams(**load.body, max_tokens=load.new)] * len(kept) if load.body else ()
        return self.gate.judge(ids, [t.token_ids for _, t in kept], params).to_dict()

    def add(self, workload: str, variant: str, load: Load, r: LoadResult, **more: Any) -> dict[str, Any]:
        m = r.metrics
        row = {"workload": workload, "variant": variant, "n_requests": len(r.requests), "failed": m["failed"], "new_tokens": load.new, "at_once": load.at_once or len(load.prompts),
            "prompt_tokens": m["total_input_tokens"], "cached_tokens": m["total_cached_tokens"], "output_tokens": m["total_output_tokens"], "seconds": r.duration,
            "output_tok_s": m["output_throughput"], "median_ttft_ms": m["median_ttft_ms"], "p95_ttft_ms": m["p95_ttft_ms"], "median_tpot_ms": m["median_tpot_ms"],
            "median_largest_gap_ms": statistics.median(max(t.itls, default=0.0) * 1e3 for t in r.requests),
            "client_share": r.client["share"], "ttfts_ms": [round(t.ttft * 1e3, 3) for t in r.requests if not t.error], **more, "token_check": self.judged(load, r)}
        self.rows.append(row)
        print(f"{workload:9s} {variant:16s} {row['output_tok_s']:8.1f} tok/s, first token {row['median_ttft_ms']:7.0f} ms, a token {row['median_tpot_ms']:6.1f} ms, "
            f"largest gap {row['median_largest_gap_ms']:6.0f} ms, {row['token_check']['status']}", flush=True)
        return row


def texts(r: LoadResult) -> list[list[int]]: return [t.token_ids for t in r.requests]

def one(b: Bench, url: str) -> None:
    load = Load(b.prompts(b.n(4), 64, 1), 32, at_once=1)
    b.add("one", "greedy", load, run(url, load))

def batch(b: Bench, url: str) -> None:
    load = Load(b.prompts(b.n(8), 64, 2), 32)
    b.add("batch", "greedy", load, run(url, load))

def sampled(b: Bench, url: str) -> None:
    load = Load(b.prompts(b.n(8), 64, 3), 32, body=SAMPLED)
    first = run(url, load)
    b.add("sampled", "all at once", load, first)
    few = Load(load.prompts, load.new, 3, load.body)
    again = run(url, few)
    b.add("sampled", "again, 3 at once", few, again, same_text=texts(again) == texts(first))

def burst(b: Bench, url: str, variant: str) -> None:
    readers, crowd = Load(b.prompts(b.n(4), 16, 4), 64), Load(b.prompts(b.n(4), b.a.max_model_len * 2 // 5, 5), 4, after_s=0.6)
    r, c = run_beside(url, [readers, crowd])
    b.add("burst", f"{variant}, readers", readers, r)
    b.add("burst", f"{variant}, crowd", crowd, c)

def siblings(b: Bench, url: str, variant: str) -> None:
    load = Load(b.prompts(b.n(12), 12, 6, prefix=b.a.max_model_len // 4), 8, at_once=4)
    b.add("siblings", variant, load, run(url, load))

def pressure(b: Bench, url: str, variant: str, seen: dict[str, Any]) -> None:
    load, before = Load(b.prompts(b.n(8), 48, 7), 48), counter(url, "num_preemptions")
    r = run(url, load)
    seen.setdefault("texts", texts(r))
    b.add("pressure", variant, load, r, preemptions=int(counter(url, "num_preemptions") - before), same_text=texts(r) == seen["texts"])


WORKLOADS = ("one", "batch", "sampled", "burst", "siblings", "pressure")

def measure(b: Bench) -> None:
    "Each server once, for the rows that it can serve."
    a, seen = b.a, dict[str, Any]()
    on = lambda w: w in a.only
    with server(a, "--max-num-seqs", 16 * max(1, round(a.scale))) as url:
        run(url, Load(b.prompts(2, 32, 99), 8))                     # warm
        if on("one"): one(b, url)
        if on("batch"): batch(b, url)
        if on("sampled"): sampled(b, url)
        if on("burst"): burst(b, url, "usual budget")
        if on("siblings"): siblings(b, url, "cache on")
        if on("pressure"): pressure(b, url, "roomy pool", seen)
    others = [("burst", ("--max-num-batched-tokens", 64), burst, ("budget 64",)), ("siblings", ("--no-prefix-cache",), siblings, ("cache off",)),
        ("pressure", ("--max-model-len", 384, "--num-blocks", max(40, round(26 * a.scale)), "--max-num-seqs", 16 * max(1, round(a.scale))), pressure, ("tight pool", seen))]
    for name, flags, work, args in others:
        if not on(name): continue
        with server(a, *flags) as url:
            run(url, Load(b.prompts(2, 32, 99), 8))
            work(b, url, *args)


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--model", default="demo")
    ap.add_argument("--device", default="cpu")
    ap.add_argument("--dtype", default="auto")
    ap.add_argument("--scale", type=float, default=1.0)
    ap.add_argument("--judged", type=int, default=4, help="requests of each row that the oracle looks at")
    ap.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    ap.add_argument("--out", type=Path, default=ROOT / "benchmarks/records/serving_eval.json")
    a = ap.parse_args()
    b = Bench(a)
    measure(b)
    record = {"kind": "serving_eval", "model": a.model, "device": a.device, "dtype": str(b.gate.dtype).removeprefix("torch."), "scale": a.scale, "threads": int(os.environ["OMP_NUM_THREADS"]),
        "environment": environment(), "rows": b.rows}
    a.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    wrong = [f"{r['workload']} ({r['variant']})" for r in b.rows if r["failed"] or r["token_check"]["status"] not in ("exact", "explained") or r.get("same_text") is False]
    if wrong: print(f"error: not to be believed: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__": sys.exit(main())
