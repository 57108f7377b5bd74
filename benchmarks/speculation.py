"""Guesses on and off, alternating, on text that copies and on text that does not: tokens must be equal, and the ratio of tok/s is the result.

    python benchmarks/speculation.py --threads 1                        prompt lookup
    python examples/train_draft_head.py --out heads/demo
    python benchmarks/speculation.py --threads 1 --head heads/demo      lookup, first layers, a draft pair, a trained head
    python benchmarks/speculation.py --parity 500                       500 requests with every feature under every method (tiny model, fp64): equal, or it raises
"""
import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
import torch
from llminfer.artifacts import environment
from llminfer.assembly import choose_parts
from llminfer.config import EngineConfig
from llminfer.core import CoreConfig, generate, make_core
from llminfer.draft import step_bytes
from llminfer.draft_head import open_draft
from llminfer.formats import read_json, write_safetensors
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


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def alternate(arms, jobs, rounds, clock):
    "Seconds [round, job] of each arm, job by job in turning order, and the texts."
    times, texts = {k: [[0.0] * len(jobs) for _ in range(rounds)] for k in arms}, {k: [[]] * len(jobs) for k in arms}
    for i in range(rounds):
        for j, (p, s) in enumerate(jobs):
            for name in (list(arms) if (i + j) % 2 == 0 else list(arms)[::-1]):
                start = clock()
                texts[name][j] = generate(arms[name], [p], s)[0]
                times[name][i][j] = clock() - start
    return times, texts


def measure(name, jobs, arms, rounds, clock):
    "One set at batch 1, every arm against `off`. Interference only ever adds time, so a job counts with the best of its rounds; the ratios of whole rounds stand beside."
    before = {k: dict(a.trace.counters) for k, a in arms.items()}
    times, texts = alternate(arms, jobs, rounds, clock)
    best, rows = {k: sum(map(min, zip(*t))) for k, t in times.items()}, []
    for arm in [k for k in arms if k != "off"]:
        made = {k: arms[arm].trace.counters.get(k, 0) - before[arm].get(k, 0) for k in ("steps", "draft_tokens", "accepted_tokens")}
        n = sum(map(len, texts[arm]))
        rows.append({"set": name, "arm": arm, "tokens": n, "equal": texts[arm] == texts["off"], "ratio": round(best["off"] / best[arm], 3),
           "round_ratios": [round(sum(b) / sum(a), 3) for a, b in zip(times[arm], times["off"])], "tok_s": {k: round(n / best[k], 1) for k in (arm, "off")},
           "acceptance": round(made["accepted_tokens"] / max(made["draft_tokens"], 1), 3), "drafted_a_token": round(made["draft_tokens"] / (n * rounds), 3),
           "tokens_a_step": round(n * rounds / max(made["steps"] - len(jobs) * rounds, 1), 3)})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def cut_model(name, n, folder):
    "The first n layers of a model in a folder of their own: the only smaller model with the demo's vocabulary that there is without a network."
    ckpt = open_checkpoint(name)
    c, layer = ckpt.config, lambda k: int(k.split(".layers.")[1].split(".")[0]) if ".layers." in k else -1
    write_safetensors(folder / "model.safetensors", {k: t.tensor(torch.float16) for k, t in ckpt.raw.items() if layer(k) < n})
    hf = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": c.vocab_size, "hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size,
        "num_hidden_layers": n, "num_attention_heads": c.n_heads, "num_key_value_heads": c.n_kv_heads, "head_dim": c.head_dim, "rms_norm_eps": c.norm_eps, "rope_theta": c.rope_theta,
        "max_position_embeddings": c.max_position_embeddings, "tie_word_embeddings": c.tie_embeddings, "eos_token_id": list(c.eos_token_ids)}
    (folder / "config.json").write_text(json.dumps(hf))
    load_tokenizer(ckpt.tokenizer)._parts.tok.save(str(folder / "tokenizer.json"))
    return str(folder)


def draft_arms(a, device, folder):
    "Settings of every arm."
    layers = max(1, open_checkpoint(a.model).config.n_layers // 3)
    cfg = EngineConfig(device=device, speculative_num_assistant_tokens=a.draft)
    return {"lookup": cfg, "self": replace(cfg, speculative_method="self", speculative_layers=layers), "pair": replace(cfg, assistant_model_name=cut_model(a.model, layers, folder)),
            "head": replace(cfg, assistant_model_name=a.head)}


def place_costs(core, model, clock, length=200, sizes=(1, 2, 3, 5, 9)):
    "Milliseconds of a step's products and attention for so many places of one row, the best of some."
    st, p, out = core.runner.state, core.runner.program, {}
    if model.device.type != "cpu": return out
    st.table[0] = torch.arange(1, st.table.shape[1] + 1)
    for m in sizes:
        ids, row, at = torch.arange(5, 5 + m), torch.zeros(1, dtype=torch.int64), torch.arange(length, length + m)
        times = []
        for _ in range(6):
            start = clock()
            with torch.inference_mode(): model.head(p.prefill(st, ids, row, at, [length], [m]))
            times.append(clock() - start)
        out[m] = round(min(times) * 1e3, 1)
    return out


def parity(n):
    "Every feature, every method, host and device."
    sys.path.insert(0, str(ROOT / "tests"))
    from support.drafts import compare
    for name, c in compare(n, seed=3).items(): print(f"{name:26} {n} requests equal; {c['draft_tokens']} guesses, {c['accepted_tokens']} right, {c['preemptions']} preemptions", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--tokens", type=int, default=64)
    ap.add_argument("--sets", type=int, default=3, help="how many of: copy greedy, fresh sampled, fresh greedy, copy sampled")
    ap.add_argument("--draft", type=int, default=8)
    ap.add_argument("--model", default="demo")
    ap.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: processor time of this process, for a machine that others use too; one thread")
    ap.add_argument("--head", help="folder of a trained head: measure every way to guess")
    ap.add_argument("--parity", type=int, help="no speed: so many requests under every method, compared with an engine that never guesses")
    ap.add_argument("--out", help="default: benchmarks/records/speculation.json, or speculation_drafts.json with --head")
    a = ap.parse_args()
    if a.parity: return parity(a.parity)
    a.out = a.out or str(ROOT / f"benchmarks/records/speculation{'_drafts' if a.head else ''}.json")
    torch.set_num_threads(a.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ckpt = open_checkpoint(a.model)
    model, tok = load_model(ckpt, torch.float32 if device == "cpu" else torch.float16, device), load_tokenizer(ckpt.tokenizer)
    cpu, limits = device == "cpu", dict(n_blocks=1 + 64, max_num_seqs=4, max_model_len=1024, prefix_cache=True)
    if not cpu: limits |= dict(window_steps=16, max_in_flight=2, follow=True, by_time=True)
    folder = Path(tempfile.mkdtemp())
    arms_cfg = draft_arms(a, device, folder) if a.head else {"on": EngineConfig(device=device, speculative_num_assistant_tokens=a.draft)}
    sources = {k: open_draft(cfg, model, tok) for k, cfg in arms_cfg.items()}
    def core(cfg, source):
        parts = choose_parts(cfg, model, source)
        cost = {"draft_cost": step_bytes(source.model) / step_bytes(model)} if source else {}
        guess = {"draft": a.draft, "free_guesses": cpu, **cost} if parts.speculate else {}
        return make_core(model, CoreConfig(**limits, **guess), runner=parts.runner, program=parts.program, speculate=parts.speculate)
    arms = {k: core(cfg, sources[k]) for k, cfg in arms_cfg.items()}
    arms["off"] = core(EngineConfig(device=device, speculative_num_assistant_tokens=0), None)
    def jobs(prompts, sampled):
        out = []
        for i, text in enumerate(prompts.values()):
            p = SamplingParams(temperature=0.8 if sampled else 0.0, top_p=0.95, top_k=50, seed=i, max_tokens=a.tokens, stop_ids=tuple(tok.eos_token_ids), eos_ids=tuple(tok.eos_token_ids))
            out.append((tok.encode_chat([{"role": "user", "content": text}]), p))
        return out
    for arm in arms.values(): generate(arm, [jobs(COPY, False)[0][0]], SamplingParams(temperature=0, max_tokens=8))
    sets = (("copy, greedy", COPY, False), ("fresh, sampled", FRESH, True), ("fresh, greedy", FRESH, False), ("copy, sampled", COPY, True))
    rows = [r for name, which, sampled in sets[:a.sets] for r in measure(name, jobs(which, sampled), arms, a.rounds, CLOCKS[a.clock])]
    costs = place_costs(arms["off"], model, CLOCKS[a.clock])
    print(costs)
    record = {"kind": "speculation", "step_ms_by_places": costs, "model": f"{a.model} ({model.dtype})", "method": f"prompt lookup, up to {a.draft} tokens a step", "threads": a.threads, "clock": a.clock,
              "environment": environment(), "rows": rows}
    if a.head:
        record |= {"kind": "speculation_drafts", "method": f"lookup, first layers, a draft pair, a trained head; up to {a.draft} tokens a step",
            "cost_of_a_guess": {k: round(step_bytes(s.model) / step_bytes(model), 3) for k, s in sources.items() if s}, "head": read_json(Path(a.head) / "config.json"),
            "arms": {k: choose_parts(cfg, model, sources[k]).reasons["speculation"].replace(str(folder), "first layers as a model of their own").replace(a.head, "trained head") for k, cfg in arms_cfg.items()}}
    Path(a.out).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__": main()
