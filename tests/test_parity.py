"""The text of a request does not depend on how the engine is set up: tiny models in fp64 under the full product, the demo model against transformers."""
import pytest
import torch
from llminfer.benchmark import judge_greedy, logit_difference
from llminfer.loading import load_model, make_tiny, open_checkpoint
from llminfer.tokenization import load_tokenizer
from support.arrays import FACTORS, core_for, pairwise, product, run, tiny_prompts
from support.prompts import PROMPTS

N_NEW = {1: 12, 3: 12, 16: 40}   # by block size: long enough to outgrow what admission sets aside


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def tiny(request, tmp_path_factory):
    "A tiny model in fp64, prompts, and the oracle's own greedy answers."
    path = make_tiny(tmp_path_factory.mktemp(request.param), request.param, 3)
    model = load_model(open_checkpoint(str(path)), torch.float64, "cpu")
    prompts = tiny_prompts(model.config.vocab_size)
    with torch.inference_mode():
        answers = []
        for p in prompts:
            ids = list(map(int, p))
            for _ in range(max(N_NEW.values())): ids.append(int(model.logits(torch.tensor(ids))[-1].argmax()))
            answers.append(ids[len(p):])
    return model, prompts, answers


@pytest.mark.parametrize("block", FACTORS["block"])
def test_full_product_on_tiny_models(tiny, block):
    model, prompts, answers = tiny
    preempted, n = 0, N_NEW[block]
    for row in [r for r in product() if r["block"] == block]:
        core = core_for(model, row, prompts, n, rows=6, flight=1 + (row["K"] > 1))
        assert run(core, row, prompts, n) == [a[:n] for a in answers], row
        preempted += core.trace.counters.get("preemptions", 0)
    assert preempted > 20


def test_pairwise_array_covers_all_pairs():
    rows = pairwise()
    for a in FACTORS:
        for b in FACTORS:
            if a != b: assert {(r[a], r[b]) for r in rows} == {(x, y) for x in FACTORS[a] for y in FACTORS[b]}
    assert len(rows) <= 14


DEMO_ROWS = {"default": dict(block=16, chunk=None, K=1, prefix_cache=True, preempt=False, mix="burst"),
             "block 3, chunk 7, K 4, preempted": dict(block=3, chunk=7, K=4, prefix_cache=False, preempt=True, mix="burst"),
             "block 1, prefix cache, K 8": dict(block=1, chunk=None, K=8, prefix_cache=True, preempt=False, mix="burst")}


@pytest.fixture(scope="module")
def demo():
    from support.hf import hf_from_checkpoint
    ckpt = open_checkpoint("demo")
    model, tok, hf = load_model(ckpt, torch.float32, "cpu"), load_tokenizer(ckpt.tokenizer), hf_from_checkpoint(ckpt)
    prompts = [tok.encode(p) for p in PROMPTS[::8][:12]]
    return model, prompts, lambda ids: hf(torch.tensor([list(ids)])).logits[0]


@pytest.mark.parametrize("name", DEMO_ROWS)
def test_demo_model_writes_what_transformers_writes(demo, name):
    model, prompts, judge = demo
    row = DEMO_ROWS[name]
    core = core_for(model, row, prompts, 32, rows=12)
    with torch.inference_mode():
        out = run(core, row, prompts, 32, check=False)
        tol = 4 * logit_difference(judge, lambda ids: model.logits(torch.tensor(list(ids))), [prompts[0] + out[0], prompts[5] + out[5]])
        verdict = judge_greedy(judge, prompts, out, tol)
    assert verdict.status in ("exact", "explained") and verdict.n_tokens == 12 * 32, verdict
    assert tol < 1e-2
    if row["preempt"]: assert core.trace.counters["preemptions"] > 0
