"""llminfer against vLLM and transformers on one GPU: same weights, same ids, alternating runs, tokens judged by the gate.

    PYTHONPATH=. python3 benchmarks/gpu_vs_vllm.py --models demo,esme-214m,qwen3-0.6b,qwen3-8b --vllm-site /tmp/site --together --out FILE
    PYTHONPATH=. python3 benchmarks/gpu_vs_vllm.py --vllm-settings "as compared,FLASHINFER,TRITON_ATTN" --models qwen3-0.6b --batches 1,8,64 --vllm-site /tmp/site --out FILE
    PYTHONPATH=. python3 benchmarks/gpu_vs_vllm.py --device cpu --models tiny --arms ours,hf --batches 1,4 --prompt 16 --new 8 --out FILE

Each arm lives in a child process of its own (gpu_child.py) and keeps its model; a pair is one run of each arm on the same new prompts, the order turned round
every time. Greedy, end ignored, prefix cache and text off on both sides, prefill included, the same KV bytes for both. A run of 1 new token gives the time to
first tokens; step = (full run - first) / (new - 1). Ours is run once more a pair with temperature, top-k, top-p and penalties: `sampled_ratio` is that speed over
the greedy one. `--vllm-settings` measures vLLM alone, under several settings in turn, to show which is its best. The record is written after every row: an interrupted run, or an arm that fails, loses only its own rows.
gpu_pack.md says how to bring vLLM to a machine without network.
"""
from __future__ import annotations
import argparse, atexit, json, math, os, platform, re, select, signal, statistics, subprocess, sys, time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
import torch
from gpu_shapes import MODELS, ROOT, Prompts, floor_us, kv_token_bytes, matrix_params, write_model
from llminfer.artifacts import cpu_name, paired_median
from llminfer.loading import open_checkpoint

HERE = Path(__file__).resolve().parent
LOG_LINES = re.compile(r"Asynchronous scheduling is .*|Using V2 Model Runner|Using .* attention backend|GPU KV cache size.*|Graph capturing finished.*|init engine .*"
                       r"|Overriding cudagraph_mode.*|Cudagraph is disabled.*|torch\.compile took .*")


VLLM_SETTINGS: dict[str, dict[str, Any]] = {   # arguments of LLM, by what is varied; "env" goes into its process
    "as compared": {}, "FLASHINFER": {"attention_backend": "FLASHINFER"}, "TRITON_ATTN": {"attention_backend": "TRITON_ATTN"},
    "interactivity": {"performance_mode": "interactivity"}, "throughput": {"performance_mode": "throughput"}, "compile sizes": {"compile_sizes": True},
    "one process": {"env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}}}


class ArmError(RuntimeError):
    "An arm answered with an error, died or took too long; the message is for the record."


class Child:
    "A process that serves one arm."
    def __init__(self, arm: str, log: Path, env: dict[str, str]):
        self.arm, self.log, self.t0 = arm, log, time.perf_counter()
        cmd = [sys.executable, str(HERE / "gpu_child.py"), arm]
        with open(log, "ab") as f:
            self.proc = subprocess.Popen(cmd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=f, env=os.environ | env, cwd=ROOT, process_group=0)
        self.buffer = b""
        atexit.register(self.kill)

    def send(self, op: str, **request: Any) -> None:
        try:
            assert self.proc.stdin
            self.proc.stdin.write(json.dumps({"op": op} | request).encode() + b"\n")
            self.proc.stdin.flush()
        except OSError: pass                        # it died: `receive` says so

    def receive(self, timeout: float) -> dict[str, Any]:
        assert self.proc.stdout
        end, fd = time.perf_counter() + timeout, self.proc.stdout.fileno()
        while b"\n" not in self.buffer:
            if not select.select([fd], [], [], 0.5)[0]:
                if self.proc.poll() is None and time.perf_counter() < end: continue
                raise self.fault(f"no answer in {timeout:.0f} s")
            if not (part := os.read(fd, 1 << 20)): raise self.fault("it ended")
            self.buffer += part
        line, self.buffer = self.buffer.split(b"\n", 1)
        reply = json.loads(line)
        if not reply["ok"]: raise ArmError(f"{self.arm}: {reply['error']}")
        return reply

    def call(self, op: str, timeout: float = 180, **request: Any) -> dict[str, Any]:
        self.send(op, **request)
        return self.receive(timeout)

    def fault(self, what: str) -> ArmError:
        self.kill()
        tail = [x for x in self.log.read_text(errors="replace").splitlines() if x.strip()][-1:]
        return ArmError(f"{self.arm}: {what}, exit code {self.proc.returncode}; log: {' '.join(tail)[-300:]}")

    def quit(self) -> None:
        self.send("quit")
        try: self.proc.wait(20)
        except subprocess.TimeoutExpired: pass
        self.kill()

    def kill(self) -> None:
        "End the child and what it started."
        try: os.killpg(self.proc.pid, signal.SIGKILL)
        except ProcessLookupError: pass
        self.proc.wait()
        atexit.unregister(self.kill)


class Model:
    "The arms of one model, started, warmed and measured."
    def __init__(self, name: str, a: argparse.Namespace):
        self.name, self.a = name, a
        self.children: dict[str, Child] = {}
        self.starting: dict[str, Child] = {}
        self.reasons: dict[str, str] = {}
        self.arms = [arm for arm in a.arms if arm != "hf" or name in (a.hf_models or a.models)]
        self.info: dict[str, Any] = {arm: {} for arm in self.arms}
        t = time.perf_counter()
        self.folder = write_model(name, Path(a.folder) / f"{name}-{a.dtype}", a.device, a.dtype)
        if a.device == "cuda": torch.cuda.empty_cache()
        self.write_s, self.config = time.perf_counter() - t, open_checkpoint(self.folder).config
        self.prompts, self.n_seed = Prompts(name, self.config.vocab_size, a.prompt), 0
        self.outputs: dict[tuple[str, int], dict[str, Any]] = {}

    def load_request(self, arm: str) -> dict[str, Any]:
        "What an arm is told to load: both engines get rows, lengths, budget and KV bytes alike."
        a, c = self.a, self.config
        rows, blocks = max(a.batches), max(a.batches) * -(-(a.prompt + a.new) // 16) + 64
        base = {"model": str(self.folder), "device": a.device, "dtype": a.dtype}
        if arm == "judge": return base | {"oracle": "float64" if a.dtype == "float32" else "float32"}
        base |= {"extra": a.extra.get(arm, {})}
        if arm == "hf": return base
        base |= {"rows": rows, "max_model_len": -(-(a.prompt + a.new) // 128) * 128 + 128, "budget": a.budget}
        if arm == "ours": return base | {"n_blocks": blocks}
        kv = blocks * 16 * kv_token_bytes(c)
        need = 1.2 * (2 * matrix_params(c) + c.vocab_size * c.hidden_size * 2) + kv + 4e9
        return base | {"kv_bytes": kv, "gpu_share": round(min(need / gpu_bytes(), 0.9), 3), "sizes": a.batches}

    def spawn(self, arm: str, label: str = "", extra: dict[str, Any] | None = None, env: dict[str, str] | None = None, sites: tuple[str, ...] = ()) -> Child:
        "Start an arm and tell it to load; `extra` settings, environment and folders of packages are for this child alone."
        path = [*sites, *([self.a.vllm_site] if arm == "vllm" and self.a.vllm_site else []), str(ROOT)]
        own = {"PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
        child = Child(arm, Path(self.a.logs) / f"{self.name}.{label or arm}.log", own | (env or {}))
        child.send("load", **self.load_request(arm) | ({} if extra is None else {"extra": extra}))
        return child

    def start(self, arms: list[str]) -> None:
        for arm in arms: self.starting[arm] = self.spawn(arm)

    def first_token(self, child: Child) -> dict[str, Any]:
        "Wait for the load, then ask for one token: seconds since the process was started."
        reply = child.receive(self.a.load_timeout)
        loaded = time.perf_counter() - child.t0
        child.call("run", prompts=self.prompts(1, self.seed()), n_new=1)
        return {k: v for k, v in reply.items() if k != "ok"} | {"loaded_s": round(loaded, 2), "first_token_s": round(time.perf_counter() - child.t0, 2)}

    def wait(self) -> None:
        "Until every started arm has given a token."
        for arm, child in self.starting.items():
            self.children[arm] = child
            with self.guard(arm):
                self.info[arm] |= self.first_token(child)
                print(f"{self.name} {arm} started: {self.info[arm]}", flush=True)
        self.starting.clear()

    def guard(self, arm: str) -> Guard: return Guard(self, arm)

    def seed(self) -> int:
        self.n_seed += 1
        return self.n_seed

    def warm(self, batch: int) -> None:
        "Three runs at least, and until nothing is left to capture."
        for arm, child in list(self.children.items()):
            with self.guard(arm):
                for i in range(1 if arm == "hf" else 8):
                    for n in (self.a.new, 1): child.call("run", prompts=self.prompts(batch, self.seed()), n_new=n)
                    if arm == "ours" and self.a.sampled: child.call("run", prompts=self.prompts(batch, self.seed()), n_new=self.a.new, sampled=True)
                    if not child.call("idle", timeout=300)["pending"] and i >= 1: break

    def measure(self, batch: int) -> dict[str, dict[str, list[float]]]:
        "Alternating runs; returns seconds by arm, and keeps some tokens of the last pair for the gate."
        self.warm(batch)
        seconds: dict[str, dict[str, list[float]]] = {arm: {"full": [], "first": []} for arm in self.children}
        for i in range(self.a.pairs):
            full, first = (self.prompts(batch, self.seed()) for _ in range(2))
            for arm in list(self.children)[::-1 if i % 2 else 1]:
                if arm == "hf" and i >= self.a.hf_pairs: continue
                with self.guard(arm):
                    for key, prompts, n in (("full", full, self.a.new), ("first", first, 1)):
                        reply = self.children[arm].call("run", prompts=prompts, n_new=n)
                        if any(len(t) != n for t in reply["tokens"]) or len(reply["tokens"]) != batch: raise ArmError(f"{arm}: not {batch} x {n} tokens")
                        seconds[arm][key].append(round(reply["seconds"], 6))
                        if key == "full" and arm != "hf": self.keep(arm, batch, prompts, reply["tokens"])
                    if arm == "ours" and self.a.sampled:
                        seconds[arm].setdefault("sampled", []).append(round(self.children[arm].call("run", prompts=full, n_new=self.a.new, sampled=True)["seconds"], 6))
        with self.guard("ours"):
            if "ours" in self.children: self.info["ours"]["path"] = self.children["ours"].call("idle")["path"]
        return seconds

    def keep(self, arm: str, batch: int, prompts: list[list[int]], tokens: list[list[int]]) -> None:
        "Put some requests of a pair aside for the gate: the same ones of both sides."
        n = min(-(-self.a.judged // self.a.pairs), batch)
        case = self.outputs.setdefault((arm, batch), {"prompts": [], "outputs": []})
        for i in range(0, n * (batch // n), batch // n) if n else ():
            case["prompts"].append(prompts[i])
            case["outputs"].append(tokens[i])

    def row(self, batch: int) -> dict[str, Any]:
        "Measure one batch size."
        seconds = self.measure(batch)
        floor = floor_us(self.config, batch, self.a.prompt + self.a.new / 2)
        row = empty_row(self.name, batch, self.reasons)
        for arm in self.arms: row |= arm_figures(arm, seconds.get(arm, {}), batch, self.a.new)
        ours, vllm = seconds.get("ours", {}), seconds.get("vllm", {})
        row["ratio_to_vllm"] = paired(vllm.get("full", []), ours.get("full", []))
        row["ratio_to_hf"] = paired(seconds.get("hf", {}).get("full", []), ours.get("full", []))
        row["sampled_ratio"] = paired(ours.get("full", []), ours.get("sampled", []))
        row["decode_ratio"] = paired(*([f - g for f, g in zip(s.get("full", []), s.get("first", []))] for s in (vllm, ours)))
        if self.a.device == "cuda" and row.get("ours_step_us"): row |= {"floor_us": round(floor, 1), "share_of_floor": round(floor / row["ours_step_us"], 4)}
        both = [self.outputs.get((arm, batch), {}).get("outputs", []) for arm in ("ours", "vllm")]
        if all(both): row["equal_requests"] = [sum(x == y for x, y in zip(*both)), len(both[0])]   # of those put aside for the gate
        return row | {"reasons": dict(self.reasons), "seconds": seconds}

    def judge(self, rows: list[dict[str, Any]]) -> None:
        "Put both sides' tokens through the gate."
        cases = {f"{arm} {batch}": case for (arm, batch), case in self.outputs.items() if case["outputs"]}
        if not cases: return
        child = self.spawn("judge")
        try:
            child.receive(self.a.load_timeout)
            reply = child.call("judge", cases=cases, n_reference=2 * self.a.judged, timeout=300)
            for row in rows:
                row["token_check"] = {arm: reply["verdicts"][k] for arm in ("ours", "vllm") if (k := f"{arm} {row['batch']}") in reply["verdicts"]}
                row["token_check"]["reference"] = reply["reference"]
        except ArmError as e:
            for row in rows: row["reasons"]["token_check"] = str(e)
        finally: child.quit()

    def stop(self) -> None:
        if "vllm" in self.children: self.info["vllm"] |= log_facts(self.children["vllm"].log)
        for child in self.children.values(): child.send("quit")
        for child in self.children.values(): child.quit()
        self.children.clear()

    def restart_ours(self) -> None:
        "Once more from process start to first token: kernels cached, weights in the page cache, nothing else running."
        if "ours" not in self.arms or "ours" in self.reasons: return
        child = self.spawn("ours")
        try: again = {k: v for k, v in self.first_token(child).items() if k.endswith("_s")}
        except ArmError as e: again = {"error": str(e)}
        self.info["ours"]["again"] = again
        child.quit()


class Guard:
    "A failing arm is ended and named in the record; the others go on."
    def __init__(self, model: Model, arm: str): self.model, self.arm = model, arm
    def __enter__(self) -> None: pass
    def __exit__(self, kind: Any, e: BaseException | None, tb: Any) -> bool:
        if not isinstance(e, ArmError): return False
        self.model.reasons[self.arm] = str(e)
        print(f"{self.model.name}: {e}", flush=True)
        if child := self.model.children.pop(self.arm, None): child.kill()
        return True


def empty_row(model: str, batch: int, reasons: dict[str, str]) -> dict[str, Any]:
    "A row of a table with nothing measured yet, and why."
    figures = ("ours_tok_s", "vllm_tok_s", "hf_tok_s", "ratio_to_vllm", "ratio_to_hf", "decode_ratio", "sampled_ratio", "ours_step_us", "vllm_step_us", "floor_us", "share_of_floor")
    return {"model": model, "batch": batch} | dict.fromkeys(figures) | {"token_check": {}, "reasons": dict(reasons), "seconds": {}}


def arm_figures(arm: str, s: dict[str, list[float]], batch: int, new: int) -> dict[str, Any]:
    "Medians of one arm: tokens a second, microseconds a step, milliseconds to the first tokens of the batch."
    if not s.get("full") or not s.get("first"): return dict.fromkeys((f"{arm}_tok_s", f"{arm}_step_us", f"{arm}_first_ms"))
    full, first = statistics.median(s["full"]), statistics.median(s["first"])
    return {f"{arm}_tok_s": round(batch * new / full, 1), f"{arm}_step_us": round((full - first) / (new - 1) * 1e6, 1), f"{arm}_first_ms": round(first * 1e3, 3)}


def paired(theirs: list[float], ours: list[float]) -> float | None: # how many times faster ours is
    "Median of the ratios of pairs."
    ratio = paired_median(theirs, ours)
    return None if math.isnan(ratio) else round(ratio, 3)


def log_facts(log: Path) -> dict[str, Any]:
    "What vLLM's start-up log says about scheduling and graphs."
    text = log.read_text(errors="replace").replace("\r", "\n")
    return {"async_scheduling": "Asynchronous scheduling is enabled" in text, "full_graphs": bool(re.search(r"\((decode, )?FULL\)", text)), "v2_runner": "Using V2 Model Runner" in text,
            "log": list(dict.fromkeys(LOG_LINES.findall(text)))[:20]}


def smi(query: str) -> str:
    "Ask nvidia-smi; empty where there is none."
    try: return subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True, timeout=20).stdout.strip().splitlines()[0]
    except (OSError, subprocess.TimeoutExpired, IndexError): return ""


def gpu_bytes() -> int:
    "Memory of the GPU; without one, enough for any model: the arm will say what is missing."
    return int((smi("memory.total") or "1000000").split()[0]) << 20


def environment(a: argparse.Namespace) -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version
    def of(package: str) -> str | None:
        try: return version(package)
        except PackageNotFoundError: return None
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True) if not a.commit else None
    return {"gpu": smi("name") or None, "driver": smi("driver_version") or None, "cpu": cpu_name(), "cores": os.cpu_count(), "python": platform.python_version(),
            **{p: of(p) for p in ("torch", "triton", "transformers")}, "commit": a.commit or (git.stdout.strip() if git else "") or None,
            "date": datetime.now(UTC).isoformat(timespec="seconds")}


def kernel_cache() -> int:
    "Compiled Triton kernels on disk."
    return sum(1 for _ in Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton/cache").glob("*/*.cubin"))


class Record:
    "The JSON record, written whole after every change."
    def __init__(self, a: argparse.Namespace):
        settings = {k: getattr(a, k) for k in ("device", "dtype", "prompt", "new", "pairs", "hf_pairs", "budget", "judged", "together", "extra")}
        settings["vllm_environment"] = {k: v for k, v in os.environ.items() if k.startswith("VLLM_")}
        self.path, self.data = Path(a.out), {"kind": "gpu_vs_vllm", "environment": environment(a), "settings": settings, "models": {}, "rows": []}

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.data, indent=None, separators=(", ", ": ")).replace('{"model"', '\n{"model"') + "\n")
        os.replace(part, self.path)


def run_model(m: Model, a: argparse.Namespace, record: Record) -> None:
    "All batch sizes of one model, the gate, the restart."
    late = lambda: time.perf_counter() - a.t0 > a.deadline
    entry = record.data["models"][m.name]
    m.start([x for x in m.arms if x == "hf" or not a.together])
    m.wait()
    record.data["environment"]["vllm"] = m.info.get("vllm", {}).get("version") or record.data["environment"].get("vllm")
    rows: list[dict[str, Any]] = []
    for batch in a.batches:
        why = m.reasons | ({"all": f"the run's {a.deadline:.0f} s were over"} if late() else {})
        rows.append(m.row(batch) if m.children and not late() else empty_row(m.name, batch, why))
        record.data["rows"].append(rows[-1])
        record.write()
        print({k: v for k, v in rows[-1].items() if k not in ("seconds", "token_check", "reasons") and v is not None}, flush=True)
    entry["clocks"] = smi("clocks.sm,clocks.mem,temperature.gpu,power.draw") or None
    m.stop()
    measured = [r for r in rows if r["seconds"]]
    if measured and not late(): m.judge(measured)
    record.write()
    if a.restart and not late(): m.restart_ours()
    for r in measured: print(m.name, r["batch"], {k: v["status"] for k, v in r["token_check"].items() if "status" in v}, r["reasons"] or "", flush=True)
    record.write()


def arguments(argv: list[str] | None) -> argparse.Namespace:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    items = lambda s: s.split(",")
    ap.add_argument("--models", type=items, default=["esme-214m", "qwen3-0.6b", "qwen3-8b"], help=", ".join(MODELS))
    ap.add_argument("--arms", type=items, default=["ours", "vllm"], help="ours,vllm,hf")
    ap.add_argument("--batches", type=lambda s: [int(x) for x in s.split(",")], default=[1, 8, 64, 256])
    ap.add_argument("--pairs", type=int, default=5)
    ap.add_argument("--hf-pairs", type=int, default=2, help="timed runs of the hf arm")
    ap.add_argument("--hf-models", type=items, default=[], help="models that get the hf arm; default: all")
    ap.add_argument("--prompt", type=int, default=256, help="prompt tokens")
    ap.add_argument("--new", type=int, default=128, help="new tokens")
    ap.add_argument("--budget", type=int, default=16384, help="tokens a step, both engines")
    ap.add_argument("--judged", type=int, default=12, help="requests of each batch and side that the gate judges, at least one a pair; 0: no gate")
    ap.add_argument("--no-sampled", dest="sampled", action="store_false", help="leave out our sampled runs")
    ap.add_argument("--vllm-settings", type=items, default=[], help="measure vLLM alone under these settings, no other arm: " + ", ".join(VLLM_SETTINGS))
    ap.add_argument("--flashinfer-site", default="", help="folder with flashinfer-python, for the setting FLASHINFER alone")
    ap.add_argument("--device", default="cuda")
    ap.add_argument("--dtype", default=None, help="default: bfloat16, on a CPU float32")
    ap.add_argument("--together", action="store_true", help="start all children of all models at once: saves minutes, but start-up times then share the CPU")
    ap.add_argument("--no-restart", dest="restart", action="store_false", help="do not time a second start of ours")
    ap.add_argument("--extra", type=json.loads, default={}, help='JSON of more settings by arm: {"ours": {"window_steps": 16}, "vllm": {"performance_mode": "interactivity"}}')
    ap.add_argument("--vllm-site", default="", help="folder with vLLM's packages, for its process alone")
    ap.add_argument("--folder", default="/tmp/llminfer-models", help="where the models are written")
    ap.add_argument("--logs", default="", help="folder for the children's logs; default: beside --out")
    ap.add_argument("--load-timeout", type=float, default=400, help="seconds")
    ap.add_argument("--deadline", type=float, default=1e9, help="seconds after which no new measurement begins")
    ap.add_argument("--join", type=items, default=[], help="no run: these records, of runs side by side on several GPUs of a host, become one in --out")
    ap.add_argument("--commit", default="", help="for the record, where git is not at hand")
    ap.add_argument("--out", default=str(ROOT / "benchmarks/records/gpu_vs_vllm.json"))
    a = ap.parse_args(argv)
    a.dtype, a.t0 = a.dtype or ("float32" if a.device == "cpu" else "bfloat16"), time.perf_counter()
    a.logs = a.logs or str(Path(a.out).resolve().parent)
    if bad := [m for m in a.models if m not in MODELS]: ap.error(f"unknown model {bad[0]}; known: {', '.join(MODELS)}")
    if bad := [x for x in a.vllm_settings if x not in VLLM_SETTINGS]: ap.error(f"unknown setting {bad[0]}; known: {', '.join(VLLM_SETTINGS)}")
    if bad := [x for x in a.arms if x not in ("ours", "vllm", "hf")]: ap.error(f"unknown arm {bad[0]}; known: ours, vllm, hf")
    Path(a.logs).mkdir(parents=True, exist_ok=True)
    return a


def prepare(name: str, a: argparse.Namespace, record: Record) -> Model | None:
    "Write a model's folder; if that fails its rows say why."
    try: m = Model(name, a)
    except Exception as e:
        record.data["rows"] += [empty_row(name, b, {"all": f"{type(e).__name__}: {e}"}) for b in a.batches]
        record.write()
        print(f"{name}: {type(e).__name__}: {e}", flush=True)
        return None
    record.data["models"][name] = {"write_s": round(m.write_s, 1), "kernels_cached_before": kernel_cache(), "arms": m.info}
    if a.together: m.start([x for x in m.arms if x != "hf"])
    return m


class Settings:
    "vLLM under several settings, each in a process of its own; started together, measured in turn."
    def __init__(self, m: Model, a: argparse.Namespace, record: Record):
        self.m, self.a, self.record = m, a, record
        self.children: dict[str, Child] = {}
        self.info: dict[str, Any] = record.data["models"].setdefault(m.name, {"settings": {}})["settings"]

    def start(self, name: str) -> None:
        extra = dict(VLLM_SETTINGS[name])
        env = extra.pop("env", {}) | {"VLLM_CACHE_ROOT": f"/tmp/vllm-cache/{name.replace(' ', '-')}"}    # no two compile into one folder at once
        sites = (self.a.flashinfer_site,) if name == "FLASHINFER" and self.a.flashinfer_site else ()
        self.children[name] = self.m.spawn("vllm", f"vllm-{name.replace(' ', '-')}", extra, env, sites)

    def wait(self, name: str) -> None:
        self.info[name] = {"arguments": VLLM_SETTINGS[name]}
        try: self.info[name] |= self.m.first_token(self.children[name])
        except ArmError as e: self.info[name]["error"] = str(e)
        if "error" in self.info[name]: self.children.pop(name).kill()
        print(f"{self.m.name} {name}: {self.info[name]}", flush=True)

    def measure(self, batch: int) -> None:
        "Rounds of all settings on the same prompts, the order turned round every time."
        times: dict[str, dict[str, list[float]]] = {n: {"full": [], "first": []} for n in self.children}
        for i in range(-2, self.a.pairs):                 # two rounds to warm up
            prompts = {"full": self.m.prompts(batch, self.m.seed()), "first": self.m.prompts(batch, self.m.seed())}
            for name in list(self.children)[::-1 if i % 2 else 1]:
                try: got = {k: self.children[name].call("run", prompts=p, n_new=self.a.new if k == "full" else 1)["seconds"] for k, p in prompts.items()}
                except ArmError as e:
                    self.info[name]["error"] = str(e)
                    self.children.pop(name).kill()
                    continue
                if i >= 0:
                    for k, v in got.items(): times[name][k].append(round(v, 6))
        base = times.get("as compared", {}).get("full", [])
        rows = [{"model": self.m.name, "batch": batch, "setting": n} | arm_figures("vllm", t, batch, self.a.new) | {"times_as_compared": paired(base, t["full"]), "seconds": t} for n, t in times.items()]
        if done := [r for r in rows if r["vllm_tok_s"]]: max(done, key=lambda r: r["vllm_tok_s"])["best"] = True
        self.record.data["rows"] += rows
        for r in rows: print({k: v for k, v in r.items() if k != "seconds"}, flush=True)

    def run(self) -> None:
        late = lambda: time.perf_counter() - self.a.t0 > self.a.deadline
        for group in [self.a.vllm_settings] if self.a.together else [[n] for n in self.a.vllm_settings]:
            for name in group: self.start(name)
            for name in group: self.wait(name)
            for batch in self.a.batches:
                if self.children and not late(): self.measure(batch)
                self.record.write()
            for name, child in self.children.items():
                self.info[name] |= log_facts(child.log)
                child.quit()
            self.children.clear()
            self.record.write()


def join(a: argparse.Namespace) -> None:
    "One record of several runs that differ in their models only."
    record, parts = Record(a), [json.loads(Path(p).read_text()) for p in a.join]
    record.data = parts[0]
    for p in parts[1:]:
        if p["settings"] != parts[0]["settings"]: sys.exit(f"other settings: {p['settings']} and {parts[0]['settings']}")
        record.data["models"] |= p["models"]
        record.data["rows"] += p["rows"]
    order = list(MODELS)
    record.data["rows"].sort(key=lambda r: (order.index(r["model"]), r["batch"]))
    record.data["models"] = {m: record.data["models"][m] for m in order if m in record.data["models"]}
    record.data["environment"]["gpus_side_by_side"] = len(parts)
    record.write()


def main(argv: list[str] | None = None) -> None:
    a = arguments(argv)
    if a.join: return join(a)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    record = Record(a)
    record.write()
    if a.vllm_settings:
        record.data["kind"] = "vllm_settings"
        for name in a.models: Settings(Model(name, a), a, record).run()
        return
    if not a.together:
        for name in a.models:
            if m := prepare(name, a, record): run_model(m, a, record)
        return
    models = [m for name in a.models if (m := prepare(name, a, record))]
    for m in models: m.wait()
    for m in models: run_model(m, a, record)


if __name__ == "__main__": main()
