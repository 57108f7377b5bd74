"""Greedy parity of the demo model with transformers: 100 prompts x 64 tokens under every row of the pairwise array.

    OMP_NUM_THREADS=2 python benchmarks/parity.py [--prompts 100] [--tokens 64] [--out FILE]

Each row runs all prompts through the engine, then transformers judges the text with one teacher-forced forward pass a prompt.
One JSON line a row; rows already in the file are skipped, so an interrupted run goes on where it stopped.
"""
import argparse, json, sys, time
from datetime import UTC, datetime
from pathlib import Path
import torch
import transformers
from llminfer.benchmark import judge_greedy, logit_difference
from llminfer.loading import load_model, open_checkpoint
from llminfer.tokenization import load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from support.arrays import core_for, pairwise, run
from support.hf import hf_from_checkpoint
from support.prompts import PROMPTS


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--prompts", type=int, default=100)
    ap.add_argument("--tokens", type=int, default=64)
    ap.add_argument("--out", default=str(ROOT / "benchmarks/records/parity.jsonl"))
    a = ap.parse_args()
    out = Path(a.out)
    done = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    ckpt = open_checkpoint("demo")
    model, tok, hf = load_model(ckpt, torch.float32, "cpu"), load_tokenizer(ckpt.tokenizer), hf_from_checkpoint(ckpt)
    judge, ours = (lambda ids: hf(torch.tensor([list(ids)])).logits[0]), (lambda ids: model.logits(torch.tensor(list(ids))))
    prompts = [tok.encode(p) for p in PROMPTS[:a.prompts]]
    bad = 0
    for row in pairwise():
        same = (d for d in done if (d["row"], d["n_prompts"], d["n_new"]) == (row, a.prompts, a.tokens))
        old = next(same, None)
        if old: print("kept   ", old["status"], row)
        else:
            t, core = time.perf_counter(), core_for(model, row, prompts, a.tokens, rows=16)
            with torch.inference_mode():
                texts = run(core, row, prompts, a.tokens, check=False)
                t_run = time.perf_counter() - t
                tol = 4 * logit_difference(judge, ours, [p + o for p, o in zip(prompts[:3], texts)])
                v = judge_greedy(judge, prompts, texts, tol)
            old = {"row": row, "n_prompts": a.prompts, "n_new": a.tokens, "preemptions": core.trace.counters.get("preemptions", 0), "run_s": round(t_run, 1),
                   "total_s": round(time.perf_counter() - t, 1), "torch": torch.__version__, "transformers": transformers.__version__,
                   "date": datetime.now(UTC).isoformat(timespec="seconds")} | v.to_dict()
            with out.open("a") as f: f.write(json.dumps(old) + "\n")
            print(f"{old['status']:8s} {old['n_tokens']} tokens, {len(old['explained'])} explained, worst gap {old['worst_gap']:.1e}, "
                  f"{old['preemptions']} preemptions, {old['total_s']} s  {row}", flush=True)
        bad += old["status"] not in ("exact", "explained")
    sys.exit(bool(bad))


if __name__ == "__main__": main()
