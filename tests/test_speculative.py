"""Guessing ahead changes no text: all features mixed, greedy and sampled, in fp64, whoever guesses; ends inside a step; B12 of cases.md; drafts that
catch up; when guessing stops. The same with 500 requests and every arm: `python benchmarks/speculation.py --parity 500`.
"""
import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from llminfer import assembly
from llminfer.attention import KVPool
from llminfer.config import ConfigError, EngineConfig
from llminfer.core import CoreConfig, generate, make_core
from llminfer.cuda_graphs import GraphRunner
from llminfer.interfaces import RowInit
from llminfer.request import GenerationRequest, SamplingParams
from llminfer.runner import NoSync, TorchRunner
from llminfer.sequences import Pilot, SchedulerConfig, Sequence
from llminfer.draft import DeviceDrafts, DraftPages, HostDrafts, Source, first_layers
from llminfer.draft_head import load_head, same_words
from llminfer.families import random_tensors
from llminfer.loading import load_model, make_tiny
from llminfer.model import ModelConfig, Transformer
from llminfer.speculative import DeviceLookup, HostLookup, lookup, propose
from support.engines import clean  # noqa: F401  a fixture
from support.drafts import ALWAYS, METHODS, compare, crowd, drafting_engine, folders, on_the_device
from support.engines import counters, engine_around, forced_engine, forced_prompt, paged, pieces, settle, tiny, tiny_engine
from test_engine import facts

@pytest.fixture(scope="module")
def plain():
    e = tiny_engine(speculative_num_assistant_tokens=0, prefix_cache=False)
    out = [facts(r) for r in e.run_requests([GenerationRequest(**kw) for kw in crowd(100, 1)])]
    assert not counters(e).get("draft_tokens")
    e.unload()
    return out


@pytest.mark.parametrize("who, cfg", [(HostLookup, dict(block=4, blocks=60)), (HostLookup, dict(window_steps=4, max_in_flight=2, block=3, max_num_batched_tokens=80)),
    (DeviceLookup, dict(window_steps=4, max_in_flight=2, block=4, blocks=45))], ids=["host, preempts", "host, windows of 4", "device, windows of 4, preempts"])
def test_100_requests_with_every_feature_say_what_they_say_without_guesses(who, cfg, plain, monkeypatch):
    launch = TorchRunner.launch
    def watched(self, plan):
        with NoSync(): return launch(self, plan)
    monkeypatch.setattr(TorchRunner, "launch", watched)       # joint 21
    monkeypatch.setattr(assembly, "HostLookup", who)
    e = tiny_engine(**ALWAYS, **cfg)
    got = e.run_requests([GenerationRequest(**kw) for kw in crowd(100, 1)])
    for kw, r, want in zip(crowd(100, 1), got, plain): assert facts(r) == want, kw
    settle(e)
    c = counters(e)
    assert c["accepted_tokens"] > 150 and c["draft_tokens"] > 1.2 * c["accepted_tokens"] and not c.get("launch_errors")
    if "blocks" in cfg: assert c["preemptions"] > 0
    assert sum(r.stats.accepted_tokens for r in got) <= c["accepted_tokens"]
    assert all(r.stats.draft_tokens == 0 for kw, r in zip(crowd(100, 1), got) if kw.get("speculative_num_assistant_tokens") == 0 or "prefix_allowed_tokens_fn" in kw)


def test_captured_steps_guess_too():
    _, model, _ = tiny()
    cfg = CoreConfig(n_blocks=80, block_size=4, max_num_seqs=6, max_model_len=96, window_steps=4, max_in_flight=2, follow=True)
    rng = random.Random(3)
    prompts = [[rng.randrange(60, 64) for _ in range(rng.randrange(1, 20))] for _ in range(16)]
    params = [SamplingParams(temperature=rng.choice([0.0, 0.7]), seed=i, max_tokens=40, repetition_penalty=rng.choice([1, 1.1]), logit_bias=((60, 22.0), (61, 20.0), (62, 21.0))) for i in range(16)]
    want = generate(make_core(model, cfg), prompts, params)
    core = make_core(model, replace(cfg, draft=5, free_guesses=False), runner=GraphRunner, speculate=lambda R, D, device: DeviceLookup(R, D, device, least=0.0))
    for _ in range(2): assert generate(core, prompts, params) == want
    c = core.trace.counters
    assert c["accepted_tokens"] > 100 and any(k.variant.draft for k in core.runner.graphs) and not any(k.variant.draft for k in core.runner.graphs if k.kind == "prefill")
    core.scheduler.pool.check()


def test_B12_drafts_leave_greedy_text_and_logprobs_alone():
    _, model, tok = tiny(dtype=torch.float32)
    on, off = (engine_around(model, tok, speculative_num_assistant_tokens=k, speculative_confidence_threshold=0.0, max_model_len=256) for k in (4, 0))
    rng = random.Random(12)
    prompts = ["red blue " * 20 + " ".join(rng.sample(["one", "two", "ten"], rng.randrange(3))) + str(i) * (i % 3) for i in range(50)]
    jobs = [GenerationRequest(p, temperature=0.0, max_new_tokens=64, logprobs=1, ignore_eos=True) for p in prompts]
    a, b = ([r for r in e.run_requests(jobs)] for e in (on, off))
    for x, y in zip(a, b):
        assert x.token_ids == y.token_ids and len(x.logprobs) == len(x.token_ids) == 64
        assert np.allclose([p.logprob for p in x.logprobs], [p.logprob for p in y.logprobs], atol=1e-4) and all(p.logprob < 0 for p in x.logprobs)
    assert counters(on)["draft_tokens"] > 100


SONG = pieces("A", "B", "C", "D") * 6


@pytest.mark.parametrize("who", [HostLookup, DeviceLookup])
def test_a_text_that_repeats_takes_fewer_steps_and_ends_where_it_should(who, monkeypatch):
    monkeypatch.setattr(assembly, "HostLookup", who)
    e = forced_engine([SONG], block=2, speculative_confidence_threshold=0.0)
    steps = lambda: counters(e)["steps"]
    r = e.run(prompt_token_ids=forced_prompt(0), temperature=0.0)
    assert r.token_ids[:-1] == SONG and r.finish_reason == "stop" and steps() < 14
    assert r.stats.accepted_tokens >= 14 and r.stats.draft_tokens >= r.stats.accepted_tokens
    for n in range(1, 25):                                    # the limit cuts a step in two
        got = e.run(prompt_token_ids=forced_prompt(0), temperature=0.0, max_new_tokens=n)
        assert got.token_ids == SONG[:n] and got.finish_reason == "length"
    for k in range(4):                                        # so does a stop id among right guesses
        got = e.run(prompt_token_ids=forced_prompt(0) + SONG[:16], temperature=0.0, stop_token_ids=[SONG[k]])
        assert got.token_ids == SONG[:k + 1] and (got.finish_reason, got.outputs[0].stop_reason) == ("stop", SONG[k])
    cut = e.run(prompt_token_ids=forced_prompt(0), temperature=0.0, stop_sequences=["DAB"], logprobs=0)
    assert cut.generated_text == "ABC" and len(cut.token_ids) == len(cut.logprobs) == 6
    again = e.run(prompt_token_ids=forced_prompt(0) + SONG[:16], temperature=0.0)
    assert again.token_ids[:-1] == SONG[16:] and again.cached_tokens >= 16      # KV of accepted guesses is as good as any
    off = e.run(prompt_token_ids=forced_prompt(0), temperature=0.0, speculative_num_assistant_tokens=0)
    sure = e.run(prompt_token_ids=forced_prompt(0), temperature=0.0, speculative_confidence_threshold=1.0)
    assert off.token_ids == sure.token_ids == r.token_ids and off.stats.draft_tokens == sure.stats.draft_tokens == 0
    settle(e)


def test_a_nan_behind_a_right_guess_ends_the_text_there():
    e = forced_engine([SONG], forced=dict(nan_at={300: 3 + 17}), speculative_confidence_threshold=0.0)
    r = e.run(prompt_token_ids=forced_prompt(0), temperature=0.0)
    assert r.finish_reason == "error" and "not finite at token 20" in r.error and counters(e)["accepted_tokens"] > 4
    settle(e)


def naive(ids: list[int], most: int) -> tuple[int, list[int]]:
    for size in (4, 3, 2):
        for end in range(len(ids) - 2, size - 2, -1):
            if ids[end - size + 1:end + 1] == ids[len(ids) - size:]:
                text = list(ids)
                for k in range(most): text.append(text[end + 1 + k])
                return size, text[len(ids):]
    return 0, []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=5), st.integers(1, 9))
def test_lookup_on_the_host_and_on_the_device_find_the_same(texts, most):
    past, n = torch.full((len(texts), 16), 2, dtype=torch.int32), torch.tensor([len(t) for t in texts])
    for row, t in zip(past, texts): row[:len(t)] = torch.tensor(t)
    size, guesses = propose(past, n, most)
    for t, s, g in zip(texts, size.tolist(), guesses.tolist()):
        want, ids = naive(t, most)
        host, found = lookup(np.array(t, np.int32), most)
        assert host == want == s and found.tolist() == ids and (not want or g == ids)


def test_wrong_guesses_become_rare():
    "A model that never says what followed before: it is asked less and less."
    pairs = [x for i in range(150) for x in (20, 21, 30 + i)]
    e = forced_engine([pairs], max_model_len=512, speculative_num_assistant_tokens=8)
    r = e.run(prompt_token_ids=forced_prompt(0), temperature=0.0, max_new_tokens=440)
    assert r.token_ids == pairs[:440] and r.stats.accepted_tokens == 0 and 5 < r.stats.draft_tokens < 40


def test_pilot_gives_up_and_tries_again():
    cfg = SchedulerConfig(draft=8, free_guesses=False)
    p, s = Pilot(cfg), Sequence(0, SamplingParams(), np.zeros(9, np.int32), 1, 1, 9, draft=8)
    many = [s] * 16
    assert p.choose(many) == 2 and p.choose([s]) == 8          # few rows: as many as they may have, since a step's time hardly depends on it
    p.note(s, 8, 48)
    assert s.gain > 4 and p.choose(many) == 8 and [p.steps(16, [s], d, []) for d in (0, 8)] == [16, 3]
    for _ in range(8): p.note(s, 8, 0)
    assert [p.choose([s]) for _ in range(2 * p.patience)].count(0) == 2 * p.patience - 2
    assert p.choose([]) == p.choose([replace_draft(s)]) == 0
    assert Pilot(replace(cfg, free_guesses=True, max_num_batched_tokens=512)).choose([s] * 128) == 3      # the budget of a step


def test_pilot_knows_what_guesses_had_brought():
    "Windows without guesses, read a few tokens at a time: the gain is that of the steps which guesses would have made."
    text = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 1, 2, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 40, 41, 42, 43, 44, 45]
    for sizes in ([1] * 30, [30], [4] * 8, [7, 1, 22]):
        p, s = Pilot(SchedulerConfig(draft=4, free_guesses=False)), Sequence(0, SamplingParams(), np.array(text, np.int32), 14, 14, 40, draft=4, gain=0.0)
        p.peek, steps = lookup, []
        p.note, note = lambda s, n, right: (steps.append(right), note(s, n, right))[1], p.note
        assert p.choose([s]) == 0 and p.steps(16, [s], 0, [s]) == 4
        for k in sizes:
            s.n = min(s.n + k, 30)
            p.watch(s)
        assert steps == [0, 0, 4, 3, 0, 0, 0, 0, 0], steps       # two ids are looked up; at most four guesses a step; the text then goes its own way
        assert p.watches([s]) and s.seen == s.n == 30
    p.note(s, 8, 32)
    assert p.choose([s]) == 4 and p.steps(16, [s], 4, [s]) == 2 and p.steps(16, [replace_draft(s)], 0, [replace_draft(s)]) == 16


def replace_draft(s: Sequence) -> Sequence: return Sequence(1, s.params, s.ids, 1, 1, 9, draft=0)


# Drafts


@pytest.mark.parametrize("arms", [("self, host, preempts", "draft, host, windows of 4", "head, host, preempts", "head, host, as it pays", "self, host, as it pays"), ("self, device", "draft, device, preempts", "head, device, preempts")], ids=["host", "device"])
def test_drafts_with_every_feature_say_what_is_said_without(arms):
    "Adapters and grammars too; a sample of the command above."
    for name, c in compare(24, 2, arms).items(): assert c["accepted_tokens"] > 8 * ("pays" not in name) and c["draft_tokens"] >= c["accepted_tokens"]


def jobs_for_twins(n, seed):
    "Requests whose guesses by the model itself cannot be wrong: no text ends before its limit, and some may not guess."
    r = random.Random(seed)
    few = {k: 22.0 for k in (60, 61, 62)}
    return [GenerationRequest(prompt=" ".join(r.choices(["red", "blue", "the pool", "of", "is"], k=r.choice([1, 3, 12, 20]))), temperature=r.choice([0.0, 0.8]), seed=i,
        max_new_tokens=r.choice([3, 12, 30]), ignore_eos=True, n=r.choice([1, 1, 3]), logit_bias=few, frequency_penalty=r.choice([0.0, 0.3]), no_repeat_ngram_size=r.choice([0, 4]),
        speculative_num_assistant_tokens=r.choice([None, None, 0, 2])) for i in range(n)]


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("cfg", [dict(block=4, blocks=70, max_num_seqs=6), dict(window_steps=3, max_in_flight=2, block=3, max_num_batched_tokens=40)], ids=["preempts", "chunks, windows"])
def test_a_draft_that_is_the_target_is_never_wrong(device, cfg):
    "So its KV is right after prefix hits, forks, chunks, preemption, and windows of rows that did not guess."
    with on_the_device(device):
        e = tiny_engine(assistant_model_name=str(folders()["same"]), **ALWAYS, **cfg)
        jobs = jobs_for_twins(20, 4)
        for _ in range(2): out = e.run_requests(jobs)                # the second time with hits on all that the first left behind
        settle(e)
    c = counters(e)
    assert all(o.error is None for o in out) and sum(o.stats.cached_tokens for o in out) > 50
    assert c["draft_tokens"] == c["accepted_tokens"] > 200 and ("blocks" in cfg) <= (c.get("preemptions", 0) > 0)


@pytest.mark.parametrize("source", ["same", "head"])
def test_a_draft_on_a_device_catches_up_after_windows_without_guesses(source, monkeypatch):
    "Two of three windows have no guesses; what the draft lacks it computes before the next one that has."
    _, model, _ = tiny()
    turn = iter(range(10**6))
    monkeypatch.setattr(Pilot, "choose", lambda self, rows: 4 * (next(turn) % 3 == 2))
    s = Source(model) if source == "same" else load_head(folders()["head"], model)
    cfg = CoreConfig(n_blocks=120, block_size=4, max_num_seqs=6, max_model_len=160, window_steps=8, max_in_flight=2, follow=True)
    rng = random.Random(5)
    prompts = [[rng.randrange(60, 64) for _ in range(rng.randrange(1, 20))] for _ in range(8)]
    params = [SamplingParams(temperature=rng.choice([0.0, 0.7]), seed=i, max_tokens=100, logit_bias=((60, 22.0), (61, 20.0), (62, 21.0))) for i in range(8)]
    want = generate(make_core(model, cfg), prompts, params)
    core = make_core(model, replace(cfg, draft=4, free_guesses=False), runner=GraphRunner, speculate=lambda R, D, device: DeviceDrafts(R, D, device, source=s, least=0.0))
    lacks = []
    feed = DeviceDrafts.feed
    def watched(self, st, rows, at, act, nb, C):
        if C < self.wide: lacks.append((torch.where(act, at, 0) - self.pages.gap(st, rows, torch.where(act, at, 0), nb)).max())
        return feed(self, st, rows, at, act, nb, C)
    monkeypatch.setattr(DeviceDrafts, "feed", watched)
    for _ in range(2): assert generate(core, prompts, params) == want
    c = core.trace.counters
    assert max(map(int, lacks)) <= 4 and c["accepted_tokens"] > 40
    if source == "same": assert c["draft_tokens"] == c["accepted_tokens"]


@pytest.mark.parametrize("source", ["same", "head"])
def test_a_copied_block_brings_all_that_the_draft_has_of_it(source):
    "Keys and values, which of them are there, and the hidden states of a head; other blocks stay."
    _, model, _ = tiny()
    s, g = Source(model) if source == "same" else load_head(folders()["head"], model), torch.Generator().manual_seed(1)
    pages = DraftPages(s, KVPool(2, 7, 4, model.config.n_kv_heads, model.config.head_dim, torch.float64))
    kept = [pages.kv.data, pages.have, *([] if pages.hidden is None else [pages.hidden])]
    for a in kept: a.copy_(torch.randn(a.shape, generator=g, dtype=torch.float64) > 0 if a.dtype == torch.bool else torch.randn(a.shape, generator=g, dtype=torch.float64))
    def blocks(): return [pages.kv.data[:, :2 * 28].view(pages.kv.n_layers, 2, 7, -1).transpose(0, 2).clone(), *(a[:28].view(7, 4, -1).clone() for a in kept[1:])]
    before = blocks()
    pages.copy_blocks(torch.tensor([3, 1]), torch.tensor([5, 2]))
    for a, b in zip(blocks(), before): assert torch.equal(a, b[[0, 1, 1, 3, 4, 3, 6]]) and not torch.equal(b[3], b[5]) and not torch.equal(b[1], b[2])


def test_trust_falls_with_a_wrong_guess_is_forgiven_when_passed_over_and_is_handed_on():
    d, (row, none, one) = HostDrafts(2, 3, source=Source(tiny()[1])), torch.tensor([[0], [0], [1]])
    act, new, first = torch.tensor([True]), d.first.clone(), d.first.clone()
    fair = torch.tensor([[2, 0, 0]])                             # one guess, of the middle class
    d.learn(row, fair, one, none, ~act, act)                     # tried, and wrong
    d.learn(row, fair, none, none, ~act, act)                    # made, and not tried: its class is forgiven, the pass was in vain
    new[1], new[3] = new[1] * 0.8 * 1.01, new[3] * 0.8 * 0.8
    torch.testing.assert_close(d.chance[0], new)
    d.learn(row, fair, one, one, ~act, act)                      # right
    new[1], new[3] = 1 - (1 - new[1]) * 0.8, 1 - (1 - new[3]) * 0.8
    torch.testing.assert_close(d.chance[0], new)
    d.init_rows([RowInit(0, 1, SamplingParams(), np.ones(2, np.int32), 2, 9, draft=3)])
    torch.testing.assert_close(d.chance[0], (new + first) / 2)   # half of what is believed of all


def test_guesses_of_a_head_do_not_depend_on_what_the_cache_remembers():
    "Its hidden states lie in the pages: a prompt that is found there is as good as one that is computed."
    e = drafting_engine("head", block=4, **ALWAYS)
    ask = dict(prompt="the pool of blocks is small and red blue red green ", temperature=0.0, max_new_tokens=30, ignore_eos=True, logit_bias={60: 22.0, 61: 20.0, 62: 21.0})
    a, b = (e.run(**ask) for _ in range(2))
    assert b.cached_tokens > 10 > a.cached_tokens and a.token_ids == b.token_ids
    assert (a.stats.draft_tokens, a.stats.accepted_tokens) == (b.stats.draft_tokens, b.stats.accepted_tokens) and a.stats.draft_tokens > 20


def test_sampled_tokens_have_the_targets_distribution():
    "Chi-square over pairs of tokens, a vocabulary of 8, 4,000 texts with guesses of another model; the draws are those of the target, or this test fails too."
    c = ModelConfig("llama", 8, 32, 48, 2, 4, 2, 8)
    target, other = (Transformer.from_tensors(c, random_tensors(c, seed), torch.float64) for seed in (1, 2))
    core = make_core(target, CoreConfig(n_blocks=200, block_size=4, max_num_seqs=64, max_model_len=16, draft=3), speculate=lambda R, D, device: HostDrafts(R, D, device, source=Source(other), least=0.0))
    n, prompt = 4000, [1, 5, 2]
    texts = generate(core, [prompt] * n, [SamplingParams(temperature=1.0, seed=i, max_tokens=3) for i in range(n)])
    first = target.logits(torch.tensor(prompt))[-1].softmax(-1)
    pairs = torch.stack([first[a] * target.logits(torch.tensor([*prompt, a]))[-1].softmax(-1) for a in range(8)])        # [8, 8]
    seen, want = Counter((a, b) for a, b, _ in texts), {(a, b): n * float(pairs[a, b]) for a in range(8) for b in range(8)}
    assert min(want.values()) > 2
    chi2 = sum((seen[k] - w) ** 2 / w for k, w in want.items())
    assert chi2 < 103.4, chi2                                                                       # 63 degrees of freedom, p = 0.001
    accepted, drafted = (core.trace.counters[k] for k in ("accepted_tokens", "draft_tokens"))
    assert drafted * 0.2 < accepted < drafted * 0.98


@pytest.mark.parametrize("price", [0.1, 0.4])
def test_a_draft_that_is_wrong_is_asked_less_and_less(price, monkeypatch):
    "Steps that drafted, of all: with a price per guess, so is the loss."
    monkeypatch.setattr("llminfer.draft.step_bytes", lambda m: price if m.config.family == "qwen3" else 1.0)
    _, model, tok = tiny()
    bias = {60 + k: 18.0 for k in range(12)}       # the text is one of twelve ids, and the draft does not know which
    e = engine_around(model, tok, assistant_model_name=str(folders()["other"]), max_model_len=512)
    r = e.run(prompt="red", temperature=1.0, seed=1, max_new_tokens=400, ignore_eos=True, logit_bias=bias)
    assert r.stats.accepted_tokens < 0.7 * r.stats.draft_tokens and r.stats.draft_tokens < 400 * (0.35 if price == 0.4 else 1.0)


def test_settings_of_drafts_act_for_the_engine_and_for_a_request():
    e = tiny_engine(assistant_model_name=str(folders()["same"]), speculative_num_assistant_tokens=5, speculative_confidence_threshold=0.0)
    ask = dict(prompt="red blue", temperature=0.0, max_new_tokens=25, ignore_eos=True)
    runs = [e.run(**ask, **kw) for kw in ({}, dict(speculative_num_assistant_tokens=1), dict(speculative_num_assistant_tokens=0), dict(speculative_confidence_threshold=1.0))]
    assert len({tuple(r.token_ids) for r in runs}) == 1
    assert [r.stats.draft_tokens for r in runs] == [20, 12, 0, 0] and runs[0].stats.accepted_tokens == 20
    info = e.info()
    assert info["speculation"] == f"a draft model drafts ({folders()['same']}), up to 5 tokens a step" and info["assistant_model"] == str(folders()["same"])
    plain = tiny_engine()
    assert info["kv_bytes"] / info["num_blocks"] == 2 * paged(plain).info()["kv_bytes"] / paged(plain).info()["num_blocks"] + info["block_size"]


def test_the_trace_tells_guesses_and_right_ones():
    e = drafting_engine("draft", trace=True, **ALWAYS)
    r = e.run(prompt="red blue", temperature=0.0, max_new_tokens=25, ignore_eos=True, logit_bias={60: 24.0, 61: 23.0})
    told = [x for ev in paged(e).trace.events if ev["event"] == "step" for x in ev.get("spec", [])]
    assert sum(n for _, n, _ in told) == r.stats.draft_tokens > 5 and sum(n for *_, n in told) == r.stats.accepted_tokens > 0


def test_metrics_count_guesses_and_right_ones():
    from llminfer.metrics import Tally, families, steady_counters
    t = Tally()
    steady = steady_counters(t, {"counters": {"draft_tokens": 5, "accepted_tokens": 2}})
    shown = {x.name: x.value for f in families(t, {}, steady, "vllm:", {}) for x in f.samples}
    assert (shown["vllm:spec_decode_num_draft_tokens_total"], shown["vllm:spec_decode_num_accepted_tokens_total"]) == (5, 2)


def test_drafts_that_cannot_be_are_refused_by_name(tmp_path):
    _, model, tok = tiny()
    head, other = str(folders()["head"]), str(folders()["other"])
    for kw, why in ((dict(speculative_method="draft"), "speculative_method 'draft' needs assistant_model_name"),
            (dict(speculative_method="self", assistant_model_name=other), "which is for method 'draft'"), (dict(speculative_method="draft", assistant_model_name=head), "which is for method 'head'"),
            (dict(speculative_method="self", speculative_layers=2), "speculative_layers must be from 1 to 1"), (dict(speculative_layers=1), "goes with speculative_method 'self' only"),
            (dict(speculative_method="self", tensor_parallel_size=2), "drafts run on one GPU, and tensor_parallel_size is 2|cannot be split"),
            (dict(speculative_method="clever"), "speculative_method must be one of lookup, draft, self, head")):
        with pytest.raises(ConfigError, match=why): engine_around(model, tok, **kw)
    with pytest.raises(ConfigError, match="drafts do not go with attention_backend='flashinfer'"):
        assembly.choose_guesses(EngineConfig(attention_backend="flashinfer"), True, Source(model))
    narrow = load_model(make_tiny(tmp_path / "n", "llama", 0, hidden_size=32), torch.float64, "cpu")
    with pytest.raises(ConfigError, match="the head was trained for another model"): load_head(head, narrow)
    with pytest.raises(ConfigError, match="needs layers to skip"): first_layers(forced_engine([[5]]).backend.model)
    words = type("Words", (), {"_parts": SimpleNamespace(tok=SimpleNamespace(get_vocab=lambda with_added_tokens: {"a": 0, "c": 1}))})()
    mine = type("Words", (), {"_parts": SimpleNamespace(tok=SimpleNamespace(get_vocab=lambda with_added_tokens: {"a": 0, "b": 1}))})()
    with pytest.raises(ConfigError, match="'small' has another vocabulary than 'large': id 1 is 'c' there and 'b' here"): same_words(mine, words, ("large", "small"))


def test_who_guesses_and_why_is_said():
    assert paged(e := tiny_engine()).info()["speculation"] == "prompt lookup, up to 8 tokens a step"
    e.unload()
    for asked, why in ((0, "off (as asked)"), (3, "prompt lookup, up to 3 tokens a step")):
        assert paged(tiny_engine(speculative_num_assistant_tokens=asked)).info()["speculation"] == why
    cuda = SimpleNamespace(device=torch.device("cuda"))
    why = assembly.choose_parts(EngineConfig(kernels="torch"), cuda).reasons["speculation"]
    assert why.startswith("off (on a GPU it pays for one row") and assembly.draft_limits(EngineConfig(), False)["draft_unasked"] == 0
    assert paged(drafting_engine("self")).info()["speculation"] == "the first 1 layers draft, up to 8 tokens a step" and set(METHODS) == {"lookup", "self", "draft", "head"}
    with pytest.raises(ConfigError, match="speculative_num_assistant_tokens=4 does not go with attention_backend='flashinfer'"):
        assembly.choose_guesses(EngineConfig(attention_backend="flashinfer", speculative_num_assistant_tokens=4), True)
