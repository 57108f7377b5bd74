"""L3-L7: the same text under load, under every feature, beside neighbours; and as transformers writes it."""
from __future__ import annotations
import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any
import torch
import torch.nn.functional as F
from llminfer.adapters import make_adapter
from llminfer.benchmark import judge_greedy, logit_difference
from llminfer.core import CoreConfig, make_core
from llminfer.engine import InferenceEngine
from llminfer.loading import load_model, open_checkpoint
from llminfer.request import GenerationRequest, SamplingParams
from llminfer.tokenization import load_tokenizer
from llminfer.tracing import inject
from reliability.checks import known
from reliability.table import Counted, family
from support.arrays import core_for, run
from support.engines import engine_around, paged, pool_of, settle, tiny
from support.prompts import PROMPTS

ROOT = Path(__file__).resolve().parents[2]
ROW = dict(block=16, chunk=None, K=1, prefix_cache=True, preempt=False, mix="burst")


@cache
def demo() -> tuple[Any, Any, Any]:
    "Checkpoint, fp32 model and tokenizer of the 135M model."
    ckpt = open_checkpoint("demo")
    return ckpt, load_model(ckpt, torch.float32, "cpu"), load_tokenizer(ckpt.tokenizer)


def features(model: Any, tok: Any, adapters: dict[str, str], **kw: Any) -> InferenceEngine:
    e = engine_around(model, tok, **kw)
    for n, path in adapters.items(): paged(e).load_adapter(path, n, activate=False)
    return e


def everything_at_once(model: Any, tok: Any, prompts: list[list[int]], count: int, n_new: int, rng: random.Random, c: Counted, what: str, rows: int, room: float) -> None:
    "Requests of prompts that share beginnings, with and without adapters, on a small pool in small chunks with drafts; each text as the plain engine writes it."
    adapters = {n: str(make_adapter(Path(mkdtemp()) / n, model.config, i, r=4, alpha=8)) for i, n in enumerate(("a", "b"))}
    jobs = [(rng.randrange(len(prompts)), rng.choice([None, None, "a", "b"])) for _ in range(count)]
    longest = max(map(len, prompts)) + n_new + 1
    ask = lambda i, name: GenerationRequest(prompt_token_ids=prompts[i], adapter=name, max_new_tokens=n_new, temperature=0.0, ignore_eos=True)
    plain = features(model, tok, adapters, max_num_seqs=1, max_model_len=longest, prefix_cache=False, speculative_num_assistant_tokens=0)
    want = {j: paged(plain).run(ask(*j)).token_ids for j in sorted(set(jobs), key=str)}
    plain.unload()
    e = features(model, tok, adapters, max_num_seqs=rows, max_model_len=longest, block=4, blocks=2 + int(longest / 4 * room), max_num_batched_tokens=24, speculative_num_assistant_tokens=4)
    for a in range(0, count, 64):
        for j, r in zip(jobs[a:a + 64], e.run_requests([ask(*j) for j in jobs[a:a + 64]])): c.add(f"{what} {j}", r.error or (None if r.token_ids == want[j] else "other tokens than the plain run"))
    settle(e)
    n = paged(e).trace.counters
    c.notes[what] = {"requests": count, "prefix_hit_tokens": pool_of(e).stats()["hit_tokens"], **{k: n.get(k, 0) for k in ("preemptions", "draft_tokens", "accepted_tokens")}}
    e.unload()
    if count >= 50 and not all(c.notes[what][k] for k in ("prefix_hit_tokens", "preemptions", "draft_tokens")): c.spoil(f"a feature did not act: {c.notes[what]}")


@family("L3", "Greedy parity under full features: prefix cache, chunks, preemption, adapters and drafts at once, fp32", 550, 30, nightly=True)
def full_features(seed: int, count: int, c: Counted) -> None:
    "Ten of eleven on the tiny model, the rest on the 135M model."
    rng = random.Random(seed)
    n_demo = count // 11 if count >= 550 else 0
    heads = [[100 + k, *(rng.randrange(20, 60) for _ in range(12))] for k in range(4)]
    prompts = [heads[i % 4] + [rng.randrange(20, 60) for _ in range(i % 9)] + heads[i % 4][-6:] for i in range(24)]
    _, model, tok = tiny("llama", torch.float32)
    everything_at_once(model, tok, prompts, count - n_demo, 24, rng, c, "tiny", 12, 4)
    if n_demo:
        _, model, tok = demo()
        say = "You are a careful assistant. Repeat every line that you are given, then answer in one sentence. "
        everything_at_once(model, tok, [tok.encode(say + p + " " + p) for p in PROMPTS[:12]], n_demo, 16, rng, c, "135M", 8, 1.3)


class Needle:
    "The logits that sequence 0 of a core is sampled from, in order."
    plan: Any = None
    def __init__(self, core: Any):
        self.core, self.calls, self.seen = core, 0, list[Any]()
        self.head = core.runner.program.head
        core.runner.program.head = self.look

    def note(self, plan: Any) -> None: self.plan, self.calls = plan, 0

    def look(self, hidden: Any) -> Any:
        out, plan = self.head(hidden), self.plan
        first = [r for ch in plan.prefill for r in ch.sample_rows]
        rows = first if first and self.calls == 0 else list(plan.rows)
        self.calls += 1
        s = self.core.scheduler.seqs.get(0)
        if s is not None and s.row in rows: self.seen.append(out[rows.index(s.row)].clone())
        return out


def needle_run(model: Any, prompts: list[list[int]], n_new: int) -> tuple[list[int], Any]:
    core = make_core(model, CoreConfig(block_size=16, n_blocks=2 + sum(-(-(len(p) + n_new + 1) // 16) for p in prompts), max_num_seqs=len(prompts), max_num_batched_tokens=256, max_model_len=max(map(len, prompts)) + n_new + 1))
    n, out = Needle(core), list[int]()
    for i, p in enumerate(prompts): core.add([i], torch.tensor(p).numpy(), [SamplingParams(temperature=0.0, max_tokens=n_new)])
    with inject("runner.launch", lambda plan: n.note(plan), times=10**9):
        while core.has_work:
            for d in core.step():
                if d.seq_id == 0: out += d.tokens.tolist()
    assert len(n.seen) == len(out) == n_new
    return out, torch.stack(n.seen)


@family("L4", "Batch independence: a needle among 1-32 others, largest logit difference at most 1e-4 in fp32, same tokens", 60, 6)
def needles(seed: int, count: int, c: Counted) -> None:
    "Five of six trials on the tiny model with random ids, the others on the 135M model with prompts of words (8 new tokens)."
    rng, worst = random.Random(seed), {"tiny": 0.0, "135M": 0.0}
    n_demo = count // 6 if count >= 60 else 0
    for t in range(count):
        big = t >= count - n_demo
        model, name = (demo()[1], "135M") if big else (tiny("llama", torch.float32)[1], "tiny")
        others = rng.randrange(1, 33)
        prompts = [demo()[2].encode(rng.choice(PROMPTS)) if big else [rng.randrange(20, 500) for _ in range(rng.randrange(1, 40))] for _ in range(others + 1)]
        with c.case(f"{t}, {others} others, {name}"):
            alone, crowd = needle_run(model, prompts[:1], 8 if big else 16), needle_run(model, prompts, 8 if big else 16)
            gap = float((alone[1] - crowd[1]).abs().max())
            worst[name] = max(worst[name], gap)
            assert alone[0] == crowd[0] and gap <= 1e-4, f"gap {gap:.2e}, tokens {'equal' if alone[0] == crowd[0] else 'differ'}"
    c.notes["largest_logit_difference"] = worst


@family("L5", "Seeded sampling: 64 seeds x 5 batch mixes, the same text each time", 320, 20)
def seeds(seed: int, count: int, c: Counted) -> None:
    _, model, tok = tiny()
    mixes: list[tuple[dict[str, Any], int, dict[str, Any]]] = [   # settings of the engine, neighbours, their settings
        (dict(max_num_seqs=1), 0, {}), (dict(max_num_seqs=8), 5, dict(temperature=0.0)), (dict(max_num_seqs=8), 7, dict(temperature=1.3, top_k=40)),
        (dict(max_num_seqs=4, max_num_batched_tokens=8, window_steps=4), 6, dict(temperature=0.7, top_p=0.8)), (dict(max_num_seqs=6, block=4, blocks=40), 9, dict(temperature=1.0))]
    ask = lambda i: GenerationRequest(prompt_token_ids=known(i % 24)[0], max_new_tokens=20, temperature=1.0, top_p=0.95, seed=1000 * seed + i, ignore_eos=True)
    n, texts = max(1, count // 5), dict[int, list[int]]()
    for m, (cfg, others, kw) in enumerate(mixes):
        e = engine_around(model, tok, **cfg)
        for i in range(n):
            rs = e.run_requests([ask(i), *(GenerationRequest(prompt_token_ids=known((i + k) % 24)[0], max_new_tokens=12, seed=k, ignore_eos=True, **kw) for k in range(others))])
            assert all(r.error is None for r in rs)
            c.add(f"seed {i}, mix {m}", None if texts.setdefault(i, rs[0].token_ids) == rs[0].token_ids else "another text")
        settle(e)
        e.unload()
    c.notes["different_texts"] = len({tuple(t) for t in texts.values()})
    if n > 1 and c.notes["different_texts"] < n * 0.9: c.spoil("seeds do not matter")


@family("L6", "HF parity: prompts of 64 new tokens on 135M, fp32, every token", 100, 0, nightly=True)
def hf_parity(seed: int, count: int, c: Counted) -> None:
    "transformers judges each text by one teacher-forced pass; a case is a prompt. Ties within four times the logit difference are told, not hidden."
    from support.hf import hf_from_checkpoint
    ckpt, model, tok = demo()
    hf = hf_from_checkpoint(ckpt)
    judge, ours = (lambda ids: hf(torch.tensor([list(ids)])).logits[0]), (lambda ids: model.logits(torch.tensor(list(ids))))
    prompts = [tok.encode(p) for p in PROMPTS[:count]]
    core = core_for(model, ROW, prompts, 64, rows=16, flight=1)
    with torch.inference_mode():
        texts = run(core, ROW, prompts, 64, check=False)
        tol = 4 * logit_difference(judge, ours, [p + o for p, o in zip(prompts[:3], texts)])
        for i, (p, o) in enumerate(zip(prompts, texts)):
            v = judge_greedy(judge, [p], [o], tol)
            c.add(f"prompt {i}", None if v.status == "exact" and v.n_tokens == 64 else f"{v.status}: {v.to_dict()}")
    c.notes |= {"tokens": sum(map(len, texts)), "tolerance": tol}


STORED = {"nf4": 18.22677}      # our own NF4 on the text below, as it was on 2026-11-30: a change of the format would move it


def text_ids() -> list[int]:
    "A fixed text of 20 KB: the licence, a page of prose, a hundred prompts."
    raw = (ROOT / "LICENSE").read_text(encoding="utf-8") + (ROOT / "benchmarks/quant_text.txt").read_text(encoding="utf-8") + "\n".join(PROMPTS)
    return demo()[2].encode(raw[:20_480])


@torch.inference_mode()
def perplexity(logits: Any, ids: list[int], window: int = 512) -> float:
    total, n = 0.0, 0
    for a in range(0, len(ids) - 1, window):
        part = ids[a:a + window + 1]
        out = logits(part[:-1]).float()
        total += float(F.cross_entropy(out, torch.tensor(part[1:]), reduction="sum"))
        n += len(part) - 1
    return float(torch.exp(torch.tensor(total / n)))


@family("L7", "Score floor: perplexity on a fixed 20 KB text within 0.1 % of HF (fp32, bf16), NF4 at its stored value, GGUF Q8_0 within 0.5 %", 4, 0, nightly=True)
def floors(seed: int, count: int, c: Counted) -> None:
    from quant_table import load_quantized
    from support.checkpoints import to_gguf
    from support.hf import hf_from_checkpoint
    ckpt, model, _ = demo()
    ids, found = text_ids(), dict[str, float]()
    if count == 1: ids = ids[:513]
    ours = lambda m: (lambda part: m.logits(torch.tensor(part)))
    theirs = lambda m: (lambda part: m(torch.tensor([part])).logits[0])
    def close(name: str, a: float, b: float, percent: float) -> None:
        found[name], found[name + " of HF" if name != "nf4" else "nf4 stored"] = round(a, 5), round(b, 5)
        c.add(name, None if abs(a / b - 1) * 100 <= percent else f"{a} and {b} are more than {percent} % apart")
    fp32 = perplexity(theirs(hf_from_checkpoint(ckpt)), ids)
    close("fp32", perplexity(ours(model), ids), fp32, 0.1)
    if count > 1: close("bf16", perplexity(ours(load_model(ckpt, torch.bfloat16, "cpu")), ids), perplexity(theirs(hf_from_checkpoint(ckpt, torch.bfloat16)), ids), 0.1)
    if count > 2: close("nf4", perplexity(ours(load_quantized(ckpt, plan("nf4"), torch.float32, "cpu")), ids), STORED["nf4"], 0.1)
    if count > 3:
        with TemporaryDirectory() as d:
            hf = hf_from_checkpoint(ckpt)
            hf.save_pretrained(d)
            to_gguf(Path(d), Path(d) / "q8.gguf", "Q8_0")
            close("gguf Q8_0", perplexity(ours(load_model(Path(d) / "q8.gguf", torch.float32, "cpu")), ids), fp32, 0.5)
    c.notes |= {"perplexity": found, "tokens": len(ids)}


def plan(kind: str) -> Any:
    import quant_table
    return quant_table.KINDS[kind]


