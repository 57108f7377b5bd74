"""One GPU against two ranks at batch 1, and two replicas against one at batch 256, on a machine with two GPUs.

    PYTHONPATH=. python3 benchmarks/tensor_parallel.py --out benchmarks/records/tensor_parallel.json                      (nvidia-h200-x2, about 6 minutes)
    PYTHONPATH=. python3 benchmarks/tensor_parallel.py --device cpu --model tiny --prompt 16 --new 8 --replica-batch 4 --out FILE     (proves the script, gloo)

Each arm is a whole engine in a process of its own (gpu_child.py, arm `ranks`) and keeps its model: `tp1` sees the first GPU, `tp2` both, `replica` the second. Tokens
come first: before any time, both arms' answers to the same prompts are judged against an fp32 oracle, with transformers in bf16 as the measure of what rounding
explains; a speed beside tokens that are neither exact nor explained is not believed (`benchmarks/registered/tp2_qwen3_8b_b1.toml`). Then runs alternate, the order turned round every
pair: a run of `new` tokens and one of 1; step = (full - first) / (new - 1). `ratio` is the median of tp1's full run over tp2's.
Replicas: the same batch on one alone, then on both at once, in turn; `ratio` is the throughput of both over that of the one.
"""
from __future__ import annotations
import argparse, json, os, statistics, time
from pathlib import Path
from typing import Any
from gpu_shapes import ROOT, SHAPES, Prompts, floor_us, write_model
from gpu_vs_vllm import Child, environment
from llminfer.artifacts import paired_median
from llminfer.families import ModelConfig
from llminfer.loading import tiny_tokenizer
from llminfer.parallel import QUIET_ENV

GPUS = {"tp1": "0", "tp2": "0,1", "replica": "1", "judge": "1"}


class Arms:
    "The processes, and what they are asked."
    def __init__(self, a: argparse.Namespace):
        self.a, self.n_seed = a, 0
        self.folder = write_model(a.model, Path(a.folder) / f"{a.model}-{a.dtype}", "cuda" if a.device == "cuda" else "cpu", a.dtype)
        tiny_tokenizer(512).save(str(self.folder / "tokenizer.json"))      # an engine wants one; the prompts are ids
        self.config = ModelConfig.from_hf(SHAPES[a.model])
        self.prompts, self.children = Prompts(a.model, self.config.vocab_size, a.prompt), dict[str, Child]()

    def start(self, arm: str, tp: int = 1, rows: int = 1) -> Child:
        a, need = self.a, rows * -(-(self.a.prompt + self.a.new) // 16) + 64
        env = QUIET_ENV | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": GPUS[arm], "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        child = self.children[arm] = Child("judge" if arm == "judge" else "ranks", Path(a.logs) / f"{arm}.log", env)
        base = {"model": str(self.folder), "device": a.device, "dtype": a.dtype}
        if arm == "judge": child.send("load", **base, oracle="float64" if a.dtype == "float32" else "float32")
        else: child.send("load", **base, rows=rows, n_blocks=need, max_model_len=-(-(a.prompt + a.new) // 128) * 128 + 128, budget=8192, tp=tp)
        return child

    def draw(self, batch: int) -> list[list[int]]:
        self.n_seed += 1
        return self.prompts(batch, self.n_seed)

    def run(self, arm: str, prompts: list[list[int]], n: int) -> dict[str, Any]: return self.children[arm].call("run", prompts=prompts, n_new=n)

    def warm(self, arm: str, batch: int) -> None:
        "Three runs at least, and until nothing is left to capture."
        for i in range(8):
            for n in (self.a.new, 1): self.run(arm, self.draw(batch), n)
            if not self.children[arm].call("idle", timeout=300)["pending"] and i >= 2: break

    def quit(self, *arms: str) -> None:
        for arm in arms: self.children.pop(arm).quit()


def split(arms: Arms, a: argparse.Namespace) -> dict[str, Any]:
    "One GPU against two, batch 1."
    for arm, tp in (("tp1", 1), ("tp2", 2)): arms.start(arm, tp, a.batch)
    info = {arm: arms.children[arm].receive(a.load_timeout)["info"] for arm in ("tp1", "tp2")}
    cases: dict[str, dict[str, Any]] = {arm: {"prompts": [], "outputs": []} for arm in info}
    for _ in range(a.judged):
        prompts = arms.draw(a.batch)
        for arm, case in cases.items():
            case["prompts"] += prompts
            case["outputs"] += arms.run(arm, prompts, a.new)["tokens"]
    same = sum(x == y for x, y in zip(cases["tp1"]["outputs"], cases["tp2"]["outputs"]))
    judge = arms.start("judge")
    judge.receive(a.load_timeout)
    verdicts = judge.call("judge", 400, cases=cases, n_reference=8)
    arms.quit("judge")                                            # its memory, before the clock starts
    print("tokens:", {k: v["status"] for k, v in verdicts["verdicts"].items()}, f"{same} of {len(cases['tp1']['outputs'])} answers alike", flush=True)
    for arm in info: arms.warm(arm, a.batch)
    seconds: dict[str, dict[str, list[float]]] = {arm: {"full": [], "first": []} for arm in info}
    for i in range(a.pairs):
        full, first = arms.draw(a.batch), arms.draw(a.batch)
        for arm in list(info)[::-1 if i % 2 else 1]:
            for key, prompts, n in (("full", full, a.new), ("first", first, 1)): seconds[arm][key].append(round(arms.run(arm, prompts, n)["seconds"], 6))
    med = statistics.median
    steps = {arm: round((med(s["full"]) - med(s["first"])) / (a.new - 1) * 1e6, 1) for arm, s in seconds.items()}
    row = {"model": a.model, "batch": a.batch, "seconds": seconds, "step_us": steps, "floor_us": round(floor_us(arms.config, a.batch, a.prompt + a.new / 2), 1),
        "ratio": round(paired_median(seconds["tp1"]["full"], seconds["tp2"]["full"]), 3), "token_check": verdicts["verdicts"], "reference": verdicts["reference"], "alike": [same, len(cases["tp1"]["outputs"])],
        "info": {arm: arms.children[arm].call("idle")["path"] for arm in info}}
    arms.quit("tp1", "tp2")
    return row


def replicas(arms: Arms, a: argparse.Namespace) -> dict[str, Any]:
    "Two engines at once against one alone."
    both = ("tp1", "replica")
    for arm in both: arms.start(arm, 1, a.replica_batch)
    for arm in both: arms.children[arm].receive(a.load_timeout)
    for arm in both: arms.warm(arm, a.replica_batch)
    alone, together, tokens = [], [], a.replica_batch * a.new
    for _ in range(a.pairs):
        alone.append(round(arms.run("tp1", arms.draw(a.replica_batch), a.new)["seconds"], 6))
        t = time.perf_counter()
        for arm in both: arms.children[arm].send("run", prompts=arms.draw(a.replica_batch), n_new=a.new)
        for arm in both: arms.children[arm].receive(180)
        together.append(round(time.perf_counter() - t, 6))
    arms.quit(*both)
    return {"batch": a.replica_batch, "tokens_each": tokens, "alone_s": alone, "together_s": together, "ratio": round(2 * paired_median(alone, together), 3)}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--model", default="qwen3-8b", choices=list(SHAPES))
    ap.add_argument("--device", default="cuda")
    ap.add_argument("--only", default="split,replicas", type=lambda s: s.split(","))
    for name, n in (("batch", 1), ("replica-batch", 256), ("prompt", 256), ("new", 128), ("pairs", 5), ("judged", 12), ("load-timeout", 300)): ap.add_argument(f"--{name}", type=int, default=n)
    ap.add_argument("--folder", default="/tmp/llminfer-models")
    ap.add_argument("--logs", default="/tmp")
    ap.add_argument("--commit", default="")
    ap.add_argument("--out", default=str(ROOT / "benchmarks/records/tensor_parallel.json"))
    a = ap.parse_args(argv)
    a.dtype = "bfloat16" if a.device == "cuda" else "float32"
    return a


def main(argv: list[str] | None = None) -> None:
    a = arguments(argv)
    arms = Arms(a)
    record: dict[str, Any] = {"kind": "tensor_parallel", "environment": environment(a) | {"gpus": 2 if a.device == "cuda" else 0},
        "settings": {k: getattr(a, k) for k in ("device", "dtype", "prompt", "new", "pairs", "judged")}, "rows": []}
    for part, do in (("split", split), ("replicas", replicas)):
        if part not in a.only: continue
        result = do(arms, a)
        record |= {"rows": [result]} if part == "split" else {"replicas": result}
        print(part, {k: v for k, v in result.items() if k in ("step_us", "floor_us", "ratio", "batch")}, flush=True)
        Path(a.out).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__": main()
