"""llminfer against transformers on a CPU: same weights, same ids, fp32, alternating pairs in one process.

    OMP_NUM_THREADS=2 python benchmarks/cpu_vs_hf.py [--pairs 5] [--out benchmarks/records/cpu_vs_hf.json]

Batch 1 and 8 decode 48 new tokens after 64 prompt tokens with the end off on both sides; the mixed load is 32 requests with
prompts of 16-256 and outputs of 8-128 tokens, of which only asked-for tokens count: ours runs them continuously,
transformers in static batches of 8, 16 and 32 in the order given (each batch runs to its longest output).
A pair is void, and repeated, if other processes used more than 5% of the CPU while it ran. Tokens pass the gate first.
"""
import argparse, json, platform, random, statistics, sys, time
from datetime import UTC, datetime
from pathlib import Path
import psutil
import torch
import transformers
import llminfer
from llminfer.artifacts import cpu_name, paired_median
from llminfer.benchmark import judge_greedy, logit_difference
from llminfer.core import CoreConfig, generate, make_core
from llminfer.loading import load_model, open_checkpoint
from llminfer.request import SamplingParams
from llminfer.tokenization import load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from support.hf import hf_from_checkpoint


def hf_generate(hf, prompts, new):
    "Static batch, left-padded; the end id lies outside the vocabulary, so nothing stops early."
    n = max(map(len, prompts))
    ids = torch.tensor([[0] * (n - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (n - len(p)) + [1] * len(p) for p in prompts])
    out = hf.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, eos_token_id=hf.config.vocab_size + 7, pad_token_id=0)
    return [row[n:].tolist() for row in out]


def hf_static(hf, prompts, news, batch):
    "The mixed load in static batches; returns each request's asked-for tokens."
    outs = []
    for i in range(0, len(prompts), batch):
        group = hf_generate(hf, prompts[i:i + batch], max(news[i:i + batch]))
        outs += [o[:n] for o, n in zip(group, news[i:i + batch])]
    return outs


class Busy:
    "Share of the machine's CPU that other processes used during a `with` block."
    def __enter__(self):
        self.t0, self.all0, self.me0 = time.perf_counter(), psutil.cpu_times(), sum(psutil.Process().cpu_times()[:2])
        return self

    def __exit__(self, *exc):
        c = psutil.cpu_times()
        busy = sum(getattr(c, f) - getattr(self.all0, f) for f in ("user", "nice", "system", "irq", "softirq", "steal"))
        self.seconds = time.perf_counter() - self.t0
        self.share = max(busy - (sum(psutil.Process().cpu_times()[:2]) - self.me0), 0) / (self.seconds * psutil.cpu_count())


def alternate(arms, pairs, limit=0.05, tries=40):
    "Time each arm `pairs` times, alternating; returns seconds by arm and the number of void rounds."
    times, void = {k: [] for k in arms}, 0
    while len(next(iter(times.values()))) < pairs:
        round_ = {}
        for k, fn in arms.items():
            with Busy() as b: fn()
            round_[k] = (b.seconds, b.share)
        if max(s for _, s in round_.values()) > limit:
            void += 1
            if void > tries: raise SystemExit(f"the machine is not idle: {void} rounds void")
            continue
        for k, (s, _) in round_.items(): times[k].append(s)
    return times, void


def row(name, n_tokens, times, void, verdict, baseline):
    med = {k: statistics.median(v) for k, v in times.items()}
    ratios = {k: paired_median(times[k], times["llminfer"]) for k in times if k != "llminfer"}
    others = "  ".join(f"{k} {n_tokens / med[k]:7.1f} ({ratios[k]:.2f}x)" for k in ratios)
    print(f"{name:12s} llminfer {n_tokens / med['llminfer']:7.1f} tok/s  {others}  [{verdict.status}]", flush=True)
    return {"name": name, "n_tokens": n_tokens, "seconds": times, "tok_s": {k: n_tokens / m for k, m in med.items()}, "ratio": ratios,
            "baseline": baseline, "void_rounds": void, "token_check": verdict.to_dict()}


def measure_batch(batch, model, hf, piece, judge, pairs):
    "A batch of equal lengths: 64 prompt and 48 new tokens."
    prompts, c, greedy = [piece(64) for _ in range(batch)], core(model, batch), SamplingParams(temperature=0, max_tokens=48)
    ours, theirs = generate(c, prompts, greedy), hf_generate(hf, prompts, 48)
    verdict = judge(prompts, ours)
    times, void = alternate({"llminfer": lambda: generate(c, prompts, greedy), "transformers": lambda: hf_generate(hf, prompts, 48)}, pairs)
    return row(f"batch {batch}", batch * 48, times, void, verdict, "transformers generate") | {"equal_to_transformers": ours == theirs}


def measure_mixed(model, hf, piece, judge, pairs):
    "32 requests of mixed lengths, only asked-for tokens count."
    rnd = random.Random(1)
    prompts, news, c = [piece(rnd.randint(16, 256)) for _ in range(32)], [rnd.randint(8, 128) for _ in range(32)], core(model, 32)
    params = [SamplingParams(temperature=0, max_tokens=n) for n in news]
    verdict = judge(prompts, generate(c, prompts, params))
    arms = {"llminfer": lambda: generate(c, prompts, params)}
    arms |= {f"static {b}": (lambda b=b: hf_static(hf, prompts, news, b)) for b in (8, 16, 32)}
    times, void = alternate(arms, pairs)
    return row("mixed 32", sum(news), times, void, verdict, "transformers static batches")


def core(model, rows):
    return make_core(model, CoreConfig(n_blocks=1 + 32 * 32, max_num_seqs=rows, max_model_len=512, prefix_cache=False))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--pairs", type=int, default=5)
    ap.add_argument("--only", default="1,8,mixed")
    ap.add_argument("--out", default=str(ROOT / "benchmarks/records/cpu_vs_hf.json"))
    a = ap.parse_args()
    ckpt = open_checkpoint("demo")
    model, tok = load_model(ckpt, torch.float32, "cpu"), load_tokenizer(ckpt.tokenizer)
    hf = hf_from_checkpoint(ckpt)
    text = tok.encode((ROOT / "LICENSE").read_text(), add_special_tokens=False)
    rnd = random.Random(0)
    piece = lambda n: text[(s := rnd.randrange(len(text) - n)):s + n]
    hf_logits, our_logits = (lambda ids: hf(torch.tensor([list(ids)])).logits[0]), (lambda ids: model.logits(torch.tensor(list(ids))))
    with torch.inference_mode():
        sample = [piece(128), piece(128)]
        tolerance = 4 * logit_difference(hf_logits, our_logits, sample)
        judge = lambda prompts, out: judge_greedy(hf_logits, prompts, out, tolerance)
        rows = [measure_mixed(model, hf, piece, judge, a.pairs) if x == "mixed" else measure_batch(int(x), model, hf, piece, judge, a.pairs) for x in a.only.split(",")]
    record = {"kind": "cpu_vs_hf", "model": "demo (SmolLM2-135M-Instruct, GGUF dequantised to fp32)", "environment": environment(model), "rows": rows}
    Path(a.out).write_text(json.dumps(record, indent=1) + "\n")


def environment(model):
    return {"cpu": cpu_name(), "cores": psutil.cpu_count(), "threads": torch.get_num_threads(), "python": platform.python_version(), "torch": torch.__version__,
            "transformers": transformers.__version__, "llminfer": llminfer.__version__, "linear": model.linear_kind,
            "date": datetime.now(UTC).isoformat(timespec="seconds")}


if __name__ == "__main__": main()
