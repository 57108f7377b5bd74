"""Configurations of the engine that must not change a text: their full product, a pairwise covering array, and a driver."""
import itertools
import numpy as np
from llminfer.core import CoreConfig, EngineCore, make_core
from llminfer.request import SamplingParams

FACTORS = {"block": (1, 3, 16), "chunk": (7, 64, None), "K": (1, 4, 8), "prefix_cache": (True, False), "preempt": (False, True), "mix": ("burst", "staggered", "sampled neighbours")}


def product(factors=FACTORS):
    return [dict(zip(factors, values)) for values in itertools.product(*factors.values())]


def pairwise(factors=FACTORS):
    "Rows of the product such that every pair of values of two factors occurs; greedy, and the same every time."
    names = list(factors)
    todo = {(a, x, b, y) for a, b in itertools.combinations(names, 2) for x in factors[a] for y in factors[b]}
    rows, rest = [], product(factors)
    pairs = lambda r: {(a, r[a], b, r[b]) for a, b in itertools.combinations(names, 2)}
    while todo:
        best = max(rest, key=lambda r: len(pairs(r) & todo))
        rows.append(best)
        todo -= pairs(best)
    return rows


def core_for(model, row, prompts, n_new, rows=16, flight=2, kv_dtype="auto", draft=0, **kw) -> EngineCore:
    "A core of this configuration; with `preempt`, its pool holds less than half of what the rows want at once."
    need = [-(-(len(p) + n_new) // row["block"]) for p in prompts]
    most = sum(sorted(need)[-rows:])
    n_blocks = 1 + (max(max(need), int(most * 0.45)) if row["preempt"] else most * (2 if row["prefix_cache"] else 1))
    return make_core(model, CoreConfig(block_size=row["block"], n_blocks=n_blocks, max_num_seqs=rows, max_num_batched_tokens=512, max_model_len=max(map(len, prompts)) + n_new + 1,
        prefill_chunk=row["chunk"], window_steps=row["K"], prefix_cache=row["prefix_cache"], max_in_flight=flight, follow=flight > 1, kv_dtype=kv_dtype, draft=draft,
        reveal=1 if row["K"] == 4 else None), **kw)


def run(core, row, prompts, n_new, check=True):
    "Greedy outputs of the prompts, in the company that the row's `mix` asks for."
    greedy = SamplingParams(temperature=0, max_tokens=n_new)
    late = list(enumerate(prompts))
    if row["mix"] != "staggered":
        for i, p in late: core.add([i], p, [greedy])
        late = []
    if row["mix"] == "sampled neighbours":
        for j, p in enumerate(prompts[::3]):
            core.add([1000 + j], p, [SamplingParams(temperature=1.1, top_k=(0, 30)[j % 2], top_p=0.9, seed=j, max_tokens=n_new // 2 + 1, presence_penalty=j % 3, logprobs=j % 4 - 1)])
    out, steps = {i: [] for i in range(len(prompts))}, 0
    while core.has_work or late:
        if late and (steps % 3 == 0 or not core.has_work):
            i, p = late.pop(0)
            core.add([i], p, [greedy])
        for d in core.step():
            assert d.error is None, d.error
            if d.seq_id in out: out[d.seq_id] += d.tokens.tolist()
        if check: core.scheduler.pool.check()
        steps += 1
    assert core.scheduler.pool.n_held == core.scheduler.pool.n_draining == 0
    return [out[i] for i in range(len(prompts))]


def tiny_prompts(vocab_size, seed=0, lengths=(1, 2, 9, 16, 17, 33, 70, 16)):
    "Random prompts; the last shares its first 16 ids with the fifth."
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, vocab_size, n).astype(np.int32) for n in lengths]
    prompts[-1] = prompts[4][:16].copy()
    return prompts
