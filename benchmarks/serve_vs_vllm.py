"""`llminfer serve` against `vllm serve` on one GPU: one client, the same prompts, closed loops of streams, alternating, texts judged.

    PYTHONPATH=. python3 benchmarks/serve_vs_vllm.py --vllm-site /tmp/site --streams 1,8,64 --out FILE
    PYTHONPATH=. python3 benchmarks/serve_vs_vllm.py --device cpu --preset tiny --arms ours --streams 1,4 --input 24 --output 16 --out FILE

Both serve the same folder: a bundle of random weights with a real tokenizer (`llminfer make-bundle --preset 214m`) in Hugging Face's layout. A run is 4 requests
a stream (8 at least): 256 tokens in, 128 tokens out, greedy, end ignored, prefix cache off on both sides. `ratio`: the median over pairs of output tok/s, ours over
vLLM's. The client runs in this process; `client_ms` is how late its loop was. Token ids come back with the text (`return_token_ids`) and some of each side go
through the gate of gpu_child.py: the fp32 oracle, and what transformers in bf16 misses.
Prediction, written before the first run: 2.0 / 1.8 / 1.7 times at 1 / 8 / 64 streams; the rule of the issue is 1.5.
"""
from __future__ import annotations
import argparse, json, os, platform, signal, socket, subprocess, sys, tempfile, time, urllib.error, urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
import torch
from gpu_vs_vllm import ArmError, Child
from llminfer.artifacts import cpu_name, paired_median
from llminfer.bundles import bundle_to_hf, make_bundle
from llminfer.load_client import LoadResult, LoadSettings, make_prompts, run_load
from llminfer.loading import open_checkpoint
from llminfer.tokenization import load_tokenizer

ROOT = Path(__file__).resolve().parents[1]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Server:
    "One side, in a process group of its own."
    def __init__(self, arm: str, folder: Path, a: argparse.Namespace):
        self.arm, self.port, self.t0 = arm, free_port(), time.perf_counter()
        rows, path = max(a.streams), [str(ROOT), a.ours_site if arm == "ours" else ""]
        where = ["--host", "127.0.0.1", "--port", str(self.port), "--max-num-seqs", str(max(rows, 8)), "--max-model-len", str(a.input + a.output + 64)]
        if arm == "ours": cmd = [sys.executable, "-m", "llminfer", "serve", "--model", str(folder), "--served-model-name", "m", "--device", a.device, "--dtype", a.dtype, "--no-prefix-cache",
            *(["--gpu-memory-utilization", "0.3"] if a.device == "cuda" else []), *where]
        else:
            path.insert(0, a.vllm_site)
            cmd = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", "m", "--dtype", "bfloat16", "--no-enable-prefix-caching",
                   "--gpu-memory-utilization", "0.4", "--kv-cache-memory-bytes", str(8 << 30), "--no-enable-log-requests", *where]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in path if p), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
        self.log = Path(a.logs) / f"serve-{arm}.log"
        with open(self.log, "wb") as f: self.proc = subprocess.Popen(cmd, stdout=f, stderr=f, env=env, start_new_session=True)

    def wait(self, timeout: float) -> float: # seconds from start to ready
        while time.perf_counter() - self.t0 < timeout:
            if self.proc.poll() is not None: break
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/{'ready' if self.arm == 'ours' else 'health'}", timeout=2) as r:
                    if r.status == 200: return time.perf_counter() - self.t0
            except (urllib.error.URLError, OSError): pass
            time.sleep(0.2)
        lines = [x for x in self.log.read_text(errors="replace").splitlines() if x.strip()]
        raise ArmError(f"{self.arm}: not ready in {timeout:.0f} s, exit code {self.proc.poll()}; log: {' '.join(lines[-2:])[-300:]}")

    def load(self, a: argparse.Namespace, streams: int, seed: int) -> LoadResult:
        s = LoadSettings(f"http://127.0.0.1:{self.port}/v1", "m", n_requests=max(8, 4 * streams), max_concurrency=streams, input_len=a.input, output_len=a.output, seed=seed,
                         extra_body={"return_token_ids": True})
        prompts = make_prompts(s.n_requests, a.input, seed=seed, tokenizer=a.tokenizer)
        r = run_load(s, prompts)
        for t, p in zip(r.requests, prompts): t.prompt_ids = a.tokenizer.encode(p)
        if r.errors(): raise ArmError(f"{self.arm}: {r.errors()}")
        return r

    def stop(self) -> None:
        if self.proc.poll() is None: os.killpg(self.proc.pid, signal.SIGTERM)
        try: self.proc.wait(20)
        except subprocess.TimeoutExpired: os.killpg(self.proc.pid, signal.SIGKILL)


def figures(r: LoadResult) -> dict[str, float]:
    m = r.metrics
    return {"tok_s": m["output_throughput"], "ttft_ms": m["median_ttft_ms"], "tpot_ms": m["median_tpot_ms"], "client_ms": float(r.client["loop_ms"]["mean_loop_ms"])}


def measure(servers: dict[str, Server], a: argparse.Namespace, streams: int, kept: dict[str, dict[str, Any]]) -> dict[str, Any]:
    "Pairs of runs at one number of streams, the order turned round every time."
    runs: dict[str, list[dict[str, float]]] = {arm: [] for arm in servers}
    for i in range(-2, a.pairs):          # two to warm up, with texts of their own
        for arm in list(servers)[::-1 if i % 2 else 1]:
            r = servers[arm].load(a, streams, 1000 * streams + i)
            if i < 0: continue
            runs[arm].append(figures(r))
            case = kept.setdefault(f"{arm} {streams}", {"prompts": [], "outputs": []})
            for t in r.requests[:: max(len(r.requests) // 2, 1)][:2]:
                case["prompts"].append(t.prompt_ids)
                case["outputs"].append(t.token_ids)
    row: dict[str, Any] = {"streams": streams, "runs": runs}
    for arm, all_ in runs.items(): row |= {f"{arm}_{k}": round(sorted(x[k] for x in all_)[len(all_) // 2], 3) for k in all_[0]}
    if len(runs) == 2: row["ratio"] = paired_median([1 / x["tok_s"] for x in runs["vllm"]], [1 / x["tok_s"] for x in runs["ours"]])
    return row


def judge(folder: Path, a: argparse.Namespace, kept: dict[str, dict[str, Any]]) -> dict[str, Any]:
    "The gate's verdict on the texts of each side."
    if missing := [k for k, c in kept.items() if not all(c["outputs"]) or not all(c["prompts"])]: return {"error": f"no token ids came from {', '.join(missing)}"}
    child = Child("judge", Path(a.logs) / "judge.log", {"PYTHONPATH": str(ROOT)})
    try: return child.call("load", model=str(folder), device=a.device, dtype=a.dtype, oracle="float32", timeout=120) and child.call("judge", cases=kept, n_reference=8, timeout=300)
    except ArmError as e: return {"error": str(e)}
    finally: child.quit()


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--arms", type=lambda s: s.split(","), default=["ours", "vllm"])
    ap.add_argument("--streams", type=lambda s: [int(x) for x in s.split(",")], default=[1, 8, 64])
    ap.add_argument("--preset", default="214m", choices=["tiny", "214m"])
    ap.add_argument("--device", default="cuda")
    ap.add_argument("--input", type=int, default=256, help="tokens of a prompt")
    ap.add_argument("--output", type=int, default=128, help="tokens of an answer")
    ap.add_argument("--pairs", type=int, default=3)
    ap.add_argument("--vllm-site", default="")
    ap.add_argument("--ours-site", default="", help="fastapi, uvicorn and what they need, where they are not installed")
    ap.add_argument("--logs", default=tempfile.gettempdir())
    ap.add_argument("--out", default=os.path.join(os.environ.get("OUT", "."), "serve_vs_vllm.json"))
    a = ap.parse_args()
    a.dtype = "float32" if a.device == "cpu" else "bfloat16"
    gpu = torch.cuda.get_device_name() if a.device == "cuda" else None
    data: dict[str, Any] = {"kind": "serve_vs_vllm", "date": datetime.now(UTC).isoformat(timespec="seconds"), "model": f"esme-{a.preset}", "input": a.input, "output": a.output, "ready_s": {},
        "environment": {"cpu": cpu_name(), "gpu": gpu, "python": platform.python_version(), "torch": torch.__version__,
        "vllm": next((p.name.split("-")[1] for p in Path(a.vllm_site or "none").glob("vllm-*.dist-info")), None)}, "rows": [], "errors": {}}
    with tempfile.TemporaryDirectory() as tmp:
        folder, servers, kept = bundle_to_hf(make_bundle(Path(tmp) / "bundle", a.preset), Path(tmp) / "hf"), dict[str, Server](), dict[str, dict[str, Any]]()
        a.tokenizer = load_tokenizer(open_checkpoint(folder).tokenizer)
        try:
            for arm in a.arms:               # one behind the other: vLLM measures what memory is left
                servers[arm] = Server(arm, folder, a)
                try: data["ready_s"][arm] = round(servers[arm].wait(240), 1)
                except ArmError as e: data["errors"][arm] = str(e)
                if arm in data["errors"]: servers.pop(arm).stop()
            for n in a.streams if servers else ():
                data["rows"].append(measure(servers, a, n, kept))
                print({k: v for k, v in data["rows"][-1].items() if k != "runs"}, flush=True)
                Path(a.out).write_text(json.dumps(data, indent=1) + "\n")
        except ArmError as e: data["errors"]["run"] = str(e)
        finally:
            for s in servers.values(): s.stop()
        data["token_check"] = judge(folder, a, kept)
    Path(a.out).write_text(json.dumps(data, indent=1) + "\n")
    print(data["ready_s"], data["errors"], str(data["token_check"])[:600])


if __name__ == "__main__": main()
