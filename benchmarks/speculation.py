"""Prompt lookup on and off, alternating, on text that copies and on text that does not: tokens must be equal, and the ratio of tok/s is the result.

    flock /work/scratch/cpu.lock python benchmarks/speculation.py --threads 2
"""
import argparse
import json
import time
from pathlib import Path
import torch
from llminfer.artifacts import environment
from llminfer.assembly import choose_parts
from llminfer.config import EngineConfig
from llminfer.core import CoreConfig, generate, make_core
from llminfer.loading import load_model, open_checkpoint
from llminfer.request import SamplingParams
from llminfer.tokenization import load_tokenizer

ROOT = Path(__file__).parent.parent
CODE = '''def area(width, height):
    return width * height

def volume(width, height, depth):
    return area(width, height) * depth

def cost(width, height, depth, price):
    return volume(width, height, depth) * price
'''
NOTE = ("The harbour office opens at eight on weekdays and at nine on Saturdays. Boats longer than twelve metres must be announced a day before they arrive. "
        "The pilot boards at the outer buoy, and the fee is paid at the office before the boat leaves the harbour.")
ITEMS = "1. two red apples\n2. a bag of brown rice\n3. one litre of whole milk\n4. three yellow onions\n5. a jar of strawberry jam\n6. half a loaf of rye bread\n"
COPY = {   # answers that quote their question
    "code edit": f"Rewrite this code and change the name `price` to `rate`. Answer with the whole code.\n\n{CODE}",
    "summary": f"Repeat the most important sentences of this text, word for word.\n\n{NOTE}",
    "list": f"Write this shopping list again, each line as it is, and add one line at the end.\n\n{ITEMS}",
    "correct": f"Correct the spelling of this text and print it in full.\n\n{NOTE.replace('metres', 'meters').replace('announced', 'anounced')}"}
FRESH = {  # answers that do not
    "story": "Write a short story about a lighthouse keeper who finds a letter.", "explain": "Explain how a bicycle stays upright.",
    "names": "Invent names for twelve different cafes in a small town, each with a reason.", "advice": "How should I prepare for a job interview?"}


def alternate(arms, jobs, rounds):
    "Seconds [round, job] of each arm, in turning order, and the texts."
    times, texts = {k: [] for k in arms}, {}
    for i in range(rounds):
        for name in (list(arms) if i % 2 == 0 else list(arms)[::-1]):
            texts[name], seconds = [], []
            for p, s in jobs:
                start = time.perf_counter()
                texts[name] += generate(arms[name], [p], s)
                seconds.append(time.perf_counter() - start)
            times[name].append(seconds)
    return times, texts


def measure(name, jobs, arms, rounds):
    "One set at batch 1. Interference only ever adds time, so a job counts with the best of its rounds; the ratios of whole rounds stand beside."
    before = {k: dict(a.trace.counters) for k, a in arms.items()}
    times, texts = alternate(arms, jobs, rounds)
    made = {k: arms["on"].trace.counters.get(k, 0) - before["on"].get(k, 0) for k in ("steps", "draft_tokens", "accepted_tokens")}
    n, best = sum(map(len, texts["on"])), {k: sum(map(min, zip(*t))) for k, t in times.items()}
    row = {"set": name, "tokens": n, "equal": texts["on"] == texts["off"], "ratio": round(best["off"] / best["on"], 3),
           "round_ratios": [round(sum(b) / sum(a), 3) for a, b in zip(times["on"], times["off"])], "tok_s": {k: round(n / t, 1) for k, t in best.items()},
           "acceptance": round(made["accepted_tokens"] / max(made["draft_tokens"], 1), 3), "drafted_a_token": round(made["draft_tokens"] / (n * rounds), 3),
           "tokens_a_step": round(n * rounds / max(made["steps"] - len(jobs) * rounds, 1), 3)}
    print(json.dumps(row), flush=True)
    return row


def place_costs(core, model, length=200, sizes=(1, 2, 3, 5, 9)):
    "Milliseconds of a step's products and attention for so many places of one row, the best of some."
    st, p, out = core.runner.state, core.runner.program, {}
    if model.device.type != "cpu": return out
    st.table[0] = torch.arange(1, st.table.shape[1] + 1)
    for m in sizes:
        ids, row, at = torch.arange(5, 5 + m), torch.zeros(1, dtype=torch.int64), torch.arange(length, length + m)
        times = []
        for _ in range(6):
            start = time.perf_counter()
            with torch.inference_mode(): model.head(p.prefill(st, ids, row, at, [length], [m]))
            times.append(time.perf_counter() - start)
        out[m] = round(min(times) * 1e3, 1)
    return out


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--tokens", type=int, default=64)
    ap.add_argument("--sets", type=int, default=3, help="how many of: copy greedy, fresh sampled, fresh greedy, copy sampled")
    ap.add_argument("--draft", type=int, default=8)
    ap.add_argument("--model", default="demo")
    ap.add_argument("--out", default=str(ROOT / "benchmarks/records/speculation.json"))
    a = ap.parse_args()
    torch.set_num_threads(a.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ckpt = open_checkpoint(a.model)
    model, tok = load_model(ckpt, torch.float32 if device == "cpu" else torch.float16, device), load_tokenizer(ckpt.tokenizer)
    cpu, limits = device == "cpu", dict(n_blocks=1 + 64, max_num_seqs=4, max_model_len=1024, prefix_cache=True)
    if not cpu: limits |= dict(window_steps=16, max_in_flight=2, follow=True, by_time=True)
    on, off = (choose_parts(EngineConfig(device=device, speculative_num_assistant_tokens=k), model) for k in (a.draft, 0))
    arms = {"on": make_core(model, CoreConfig(draft=a.draft, free_guesses=cpu, **limits), runner=on.runner, program=on.program, speculate=on.speculate),
            "off": make_core(model, CoreConfig(**limits), runner=off.runner, program=off.program)}
    def jobs(prompts, sampled):
        out = []
        for i, text in enumerate(prompts.values()):
            p = SamplingParams(temperature=0.8 if sampled else 0.0, top_p=0.95, top_k=50, seed=i, max_tokens=a.tokens, stop_ids=tuple(tok.eos_token_ids), eos_ids=tuple(tok.eos_token_ids))
            out.append((tok.encode_chat([{"role": "user", "content": text}]), p))
        return out
    for arm in arms.values(): generate(arm, [jobs(COPY, False)[0][0]], SamplingParams(temperature=0, max_tokens=8))
    rows = [measure(name, jobs(which, sampled), arms, a.rounds) for name, which, sampled in
            (("copy, greedy", COPY, False), ("fresh, sampled", FRESH, True), ("fresh, greedy", FRESH, False), ("copy, sampled", COPY, True))[:a.sets]]
    costs = place_costs(arms["off"], model)
    print(costs)
    record = {"kind": "speculation", "step_ms_by_places": costs, "model": f"{a.model} ({model.dtype})", "method": f"prompt lookup, up to {a.draft} tokens a step", "threads": a.threads,
              "environment": environment(), "rows": rows}
    Path(a.out).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__": main()
