"""llminfer against batched transformers as people chat: chat prompts, the model's real end, up to 256 new tokens, greedy.

    OMP_NUM_THREADS=2 python benchmarks/hf_batched.py [--concurrent 8] [--runs 3] [--lock FILE] [--out benchmarks/records/hf_batched_cpu.json]
    python benchmarks/hf_batched.py --model Qwen/Qwen3-0.6B --device cuda --dtype bfloat16 --concurrent 8,64,256 --runs 5

Three arms on the same ids: `sequential` (generate, one prompt after the other; timed once), `batched` (one left-padded generate; it computes until
the longest answer ends, and what it computes after an end is not counted) and `llminfer` (all requests at once, no prefix cache). Tokens are
counted up to and with the end. Prompts are eight short questions in turn, as many as there are requests. Arms alternate; tokens pass the gate.
"""
from __future__ import annotations
import argparse, statistics, sys, time
from pathlib import Path
from typing import Any
import torch
from cpu_backends import Busy, alone
from llminfer.artifacts import environment, paired_median, to_text, write_file
from llminfer.config import CacheConfig, EngineConfig
from llminfer.engine import InferenceEngine
from llminfer.gate import Gate
from llminfer.loading import open_checkpoint
from llminfer.request import GenerationRequest

ROOT = Path(__file__).resolve().parents[1]
QUESTIONS = ["What is the capital of France?", "Explain in two sentences why the sky is blue.", "Write a haiku about rain on a tin roof.", "Name three uses of a paper clip and say which is the oddest.",
    "How do I boil an egg so that its yolk stays soft?", "Give me a short plan for a day in a town that I do not know.", "What is the difference between a list and a tuple in Python?",
    "Tell me a story of a lighthouse keeper who is afraid of the dark, in about ten sentences."]
NEW = 256


def reference(model: str, dtype: torch.dtype, device: str) -> Any:
    "transformers' model."
    ckpt = open_checkpoint(model)
    if ckpt.format == "gguf":
        sys.path.insert(0, str(ROOT / "tests"))
        from support.hf import hf_from_checkpoint
        return hf_from_checkpoint(ckpt).to(device, dtype)
    from transformers import AutoModelForCausalLM
    return AutoModelForCausalLM.from_pretrained(str(ckpt.path), dtype=dtype).to(device).eval()


def hf_generate(net: Any, prompts: list[list[int]], ends: list[int]) -> list[list[int]]:
    "A left-padded batch; each answer up to and with its end."
    n = max(map(len, prompts))
    ids = torch.tensor([[0] * (n - len(p)) + p for p in prompts], device=net.device)
    mask = torch.tensor([[0] * (n - len(p)) + [1] * len(p) for p in prompts], device=net.device)
    with torch.inference_mode(): out = net.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, eos_token_id=ends, pad_token_id=ends[0])[:, n:].tolist()
    return [o[:next((i + 1 for i, t in enumerate(o) if t in ends), len(o))] for o in out]


def timed(fn: Any) -> tuple[float, list[list[int]]]:
    if torch.cuda.is_available(): torch.cuda.synchronize()
    t = time.perf_counter()
    out = fn()
    if torch.cuda.is_available(): torch.cuda.synchronize()
    return time.perf_counter() - t, out


def measure(e: InferenceEngine, net: Any, prompts: list[list[int]], ends: list[int], runs: int, gate: Gate, lock: str | None) -> dict[str, Any]:
    "One row: all arms with so many requests."
    def ours() -> list[list[int]]:
        rs = e.run_requests([GenerationRequest(prompt_token_ids=p, max_new_tokens=NEW, temperature=0.0) for p in prompts])
        assert not any(r.error for r in rs), [r.error for r in rs]
        return [list(r.token_ids) for r in rs]
    arms = {"llminfer": ours, "batched": lambda: hf_generate(net, prompts, ends)}
    said: dict[str, list[list[int]]] = {k: fn() for k, fn in arms.items()}       # warm-up
    verdict = gate.judge(prompts[:8], said["llminfer"][:8])
    seconds: dict[str, list[float]] = {k: [] for k in (*arms, "sequential")}
    with alone(lock), Busy() as busy:
        for i in range(runs):
            for k in list(arms)[::-1 if i % 2 else 1]:
                s, said[k] = timed(arms[k])
                seconds[k].append(s)
        if len(prompts) <= 8:
            s, said["sequential"] = timed(lambda: [hf_generate(net, [p], ends)[0] for p in prompts])
            seconds["sequential"].append(s)
    seconds = {k: v for k, v in seconds.items() if v}
    n = {k: sum(map(len, said[k])) for k in seconds}
    each = {k: [s / n[k] for s in v] for k, v in seconds.items()}
    return {"name": f"{len(prompts)} requests", "concurrent": len(prompts), "n_tokens": n, "seconds": seconds, "tok_s": {k: n[k] / statistics.median(v) for k, v in seconds.items()},
        "ratio": {k: paired_median(each[k], each["llminfer"]) for k in seconds if k != "llminfer"}, "equal_answers": sum(a == b for a, b in zip(said["llminfer"], said["batched"])),
        "ended_by_themselves": sum(o[-1] in ends for o in said["llminfer"]), "token_check": verdict.to_dict(), "others_cpu": round(busy.share, 3)}


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--model", default="demo")
    ap.add_argument("--device", default="cpu")
    ap.add_argument("--dtype", default="float32")
    ap.add_argument("--concurrent", default="8")
    ap.add_argument("--runs", type=int, default=3)
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--lock", help="a file to lock while arms are timed")
    ap.add_argument("--out", type=Path)
    a = ap.parse_args()
    torch.set_num_threads(a.threads)
    sizes = [int(x) for x in a.concurrent.split(",")]
    cfg = EngineConfig(model_name=a.model, device=a.device, dtype=a.dtype, max_num_seqs=max(sizes), max_model_len=NEW + 128, num_threads=a.threads,
        cache=CacheConfig(enable_prefix_cache=False, num_blocks=1 + max(sizes) * ((NEW + 128) // 16)))
    net, rows = reference(a.model, getattr(torch, a.dtype), a.device), []
    with InferenceEngine(cfg) as e:
        tok, gate = e.backend.tokenizer, Gate(cfg)
        chats = [[int(i) for i in tok.encode_chat([{"role": "user", "content": q}])] for q in QUESTIONS]
        ends = sorted(int(i) for i in tok.eos_token_ids)
        for n in sizes:
            rows.append(r := measure(e, net, [chats[i % 8] for i in range(n)], ends, a.runs, gate, a.lock))
            print(f"{r['name']}: " + ", ".join(f"{k} {v:.1f} tok/s" for k, v in r["tok_s"].items()) + f"; {r['ratio']['batched']:.2f} times batched [{r['token_check']['status']}]")
    record = {"kind": "hf_batched", "model": a.model, "protocol": {"prompts": "chat", "end": "the model's", "max_new_tokens": NEW, "prompt_tokens": [len(c) for c in chats], "greedy": True},
        "environment": environment() | {"dtype": a.dtype}, "rows": rows}
    if a.out: write_file(a.out, to_text(record))
    return 0 if all(r["token_check"]["status"] in ("exact", "explained") for r in rows) else 1


if __name__ == "__main__": sys.exit(main())
