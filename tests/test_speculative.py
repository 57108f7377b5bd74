"Guessing ahead changes no text: all features mixed, greedy and sampled, in fp64; ends inside a step; B12 of cases.md; who guesses, and when it stops."
import random
from dataclasses import replace
from types import SimpleNamespace
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from llminfer import assembly
from llminfer.config import ConfigError, EngineConfig
from llminfer.core import CoreConfig, generate, make_core
from llminfer.cuda_graphs import GraphRunner
from llminfer.request import GenerationRequest, SamplingParams
from llminfer.runner import NoSync, TorchRunner
from llminfer.sequences import Pilot, SchedulerConfig, Sequence
from llminfer.speculative import DeviceLookup, HostLookup, lookup, propose
from support.engines import clean  # noqa: F401  a fixture
from support.engines import counters, engine_around, forced_engine, forced_prompt, paged, pieces, settle, tiny, tiny_engine
from test_engine import facts

SAYINGS = ["red blue red green ", "the pool of blocks is small and ", "a b a b a c ", "x"]
ALWAYS = dict(speculative_num_assistant_tokens=4, speculative_confidence_threshold=0.0)


def crowd(n: int, seed: int) -> list[dict]:
    "Requests that use every feature, with texts that come again: a few ids are far likelier than the rest."
    r, out = random.Random(seed), []
    for i in range(n):
        few = {k: r.choice([20.0, 24.0]) for k in r.sample(range(60, 200), r.choice([2, 3, 5]))}
        kw = dict(prompt=r.choice(SAYINGS) * r.randrange(1, 5), temperature=r.choice([0.0, 0.0, 0.5, 1.0]), seed=i, max_new_tokens=r.choice([1, 2, 5, 17, 30]),
            top_k=r.choice([0, 5, 50]), top_p=r.choice([1.0, 0.9]), min_p=r.choice([0.0, 0.0, 0.05]), logit_bias=few, ignore_eos=r.random() < 0.5, n=r.choice([1, 1, 1, 3]),
            repetition_penalty=r.choice([1.0, 1.0, 1.1]), presence_penalty=r.choice([0.0, 0.0, 0.7]), frequency_penalty=r.choice([0.0, 0.0, 0.4]),
            no_repeat_ngram_size=r.choice([0, 0, 0, 5]), min_tokens=r.choice([0, 0, 6]), logprobs=r.choice([None, None, 0, 3]), prompt_logprobs=r.choice([None, None, None, 1]),
            prefix_key=r.choice([None, None, "salt"]), stop_token_ids=[list(few)[0]] if r.random() < 0.15 else None, bad_words=["a b"] if r.random() < 0.1 else None)
        if r.random() < 0.2: kw["stop_sequences"] = [tiny()[2].token_text(list(few)[-1]) * 2]
        if r.random() < 0.1: kw |= dict(prefix_allowed_tokens_fn=lambda _, ids: [60 + len(ids) % 7, 71], n=1)
        if r.random() < 0.2: kw["speculative_num_assistant_tokens"] = r.choice([0, 1, 3])
        out.append(kw)
    return out


@pytest.fixture(scope="module")
def plain():
    e = tiny_engine(speculative_num_assistant_tokens=0, prefix_cache=False)
    out = [facts(r) for r in e.run_requests([GenerationRequest(**kw) for kw in crowd(200, 1)])]
    assert not counters(e).get("draft_tokens")
    e.unload()
    return out


@pytest.mark.parametrize("who, cfg", [(HostLookup, dict(block=4, blocks=60)), (HostLookup, dict(window_steps=4, max_in_flight=2, block=3, max_num_batched_tokens=80)),
    (DeviceLookup, dict(window_steps=4, max_in_flight=2, block=4, blocks=45))], ids=["host, preempts", "host, windows of 4", "device, windows of 4, preempts"])
def test_200_requests_with_every_feature_say_what_they_say_without_guesses(who, cfg, plain, monkeypatch):
    launch = TorchRunner.launch
    def watched(self, plan):
        with NoSync(): return launch(self, plan)
    monkeypatch.setattr(TorchRunner, "launch", watched)       # joint 21
    monkeypatch.setattr(assembly, "HostLookup", who)
    e = tiny_engine(**ALWAYS, **cfg)
    got = e.run_requests([GenerationRequest(**kw) for kw in crowd(200, 1)])
    for kw, r, want in zip(crowd(200, 1), got, plain): assert facts(r) == want, kw
    settle(e)
    c = counters(e)
    assert c["accepted_tokens"] > 300 and c["draft_tokens"] > 1.2 * c["accepted_tokens"] and not c.get("launch_errors")
    if "blocks" in cfg: assert c["preemptions"] > 0
    assert sum(r.stats.accepted_tokens for r in got) <= c["accepted_tokens"]
    assert all(r.stats.draft_tokens == 0 for kw, r in zip(crowd(200, 1), got) if kw.get("speculative_num_assistant_tokens") == 0 or "prefix_allowed_tokens_fn" in kw)


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
    assert p.choose([s]) == 2
    p.note(s, 8, 48)
    assert s.gain > 4 and p.choose([s]) == 8
    for _ in range(8): p.note(s, 8, 0)
    assert [p.choose([s]) for _ in range(2 * p.patience)].count(0) == 2 * p.patience - 2
    assert p.choose([]) == p.choose([replace_draft(s)]) == 0
    assert Pilot(replace(cfg, free_guesses=True, max_num_batched_tokens=512)).choose([s] * 128) == 3      # the budget of a step


def replace_draft(s: Sequence) -> Sequence: return Sequence(1, s.params, s.ids, 1, 1, 9, draft=0)


def test_who_guesses_and_why_is_said():
    assert paged(e := tiny_engine()).info()["speculation"] == "prompt lookup, up to 8 tokens a step"
    e.unload()
    for asked, why in ((0, "off (as asked)"), (3, "prompt lookup, up to 3 tokens a step")):
        assert paged(tiny_engine(speculative_num_assistant_tokens=asked)).info()["speculation"] == why
    cuda = SimpleNamespace(device=torch.device("cuda"))
    why = assembly.choose_parts(EngineConfig(kernels="torch"), cuda).reasons["speculation"]
    assert why.startswith("off (its gain on a GPU is not measured") and assembly.draft_limits(EngineConfig(), False)["draft_unasked"] == 0
    with pytest.raises(ConfigError, match="speculative_num_assistant_tokens=4 does not go with attention_backend='flashinfer'"):
        assembly.choose_guesses(EngineConfig(attention_backend="flashinfer", speculative_num_assistant_tokens=4), True)
