"""The engine as its users see it: one request's answer is its own, whoever else is there, whatever goes wrong, whichever thread asks."""
import os, random, time
from pathlib import Path
import numpy as np
import pytest
import torch
from llminfer.backends import resolve_params
from llminfer.config import ConfigError, EngineConfig
from llminfer.core import CoreConfig, generate, make_core
from llminfer.engine import InferenceEngine
from llminfer.request import GenerationRequest, RequestError
from llminfer.runner import NoSync, TorchRunner
from llminfer.tracing import inject
from support.engines import clean  # noqa: F401  a fixture
from support.engines import (GREEDY, counters, drain, engine_around, forced_engine, forced_prompt, oracle, paged, pieces,
    pool_of, settle, tiny, tiny_engine)

ROOT = Path(__file__).parent.parent

# A crowd in which every feature is used by somebody.
WORDS = "the pool of blocks is small and every request wants more of it than there is "
CROWD = [
    dict(prompt=WORDS * 2, temperature=0.0, max_new_tokens=20, ignore_eos=True),
    dict(prompt=WORDS, temperature=0.0, max_new_tokens=24, ignore_eos=True, logprobs=3, prompt_logprobs=2),
    dict(prompt="x", temperature=0.9, seed=1, top_k=0, top_p=1.0, max_new_tokens=17),
    dict(prompt=WORDS + "one", temperature=1.3, seed=2**64 - 1, top_k=40, top_p=0.9, max_new_tokens=21, logprobs=0),
    dict(prompt=WORDS + "two", temperature=0.7, seed=3, top_k=0, min_p=0.1, max_new_tokens=14, ignore_eos=True),
    dict(prompt="abc abc abc", temperature=0.0, repetition_penalty=1.3, no_repeat_ngram_size=2, max_new_tokens=24, ignore_eos=True),
    dict(prompt="penalties", temperature=1.0, seed=4, presence_penalty=1.5, frequency_penalty=-0.5, max_new_tokens=16),
    dict(prompt=WORDS, temperature=1.0, seed=5, n=3, max_new_tokens=10, logprobs=1),
    dict(prompt="bias", temperature=0.0, logit_bias={65: 4.5, 66: -100.0}, bad_words=["a", "the"], max_new_tokens=12, ignore_eos=True),
    dict(prompt="ends", temperature=1.5, seed=6, min_tokens=9, stop_token_ids=list(range(3, 150)), max_new_tokens=30),
    dict(prompt="stop here", temperature=1.5, seed=7, stop_sequences=["e", "zz"], min_tokens=3, max_new_tokens=40, ignore_eos=True),
    dict(prompt="stop", temperature=1.2, seed=8, stop_sequences=["t"], include_stop_str_in_output=True, n=2, max_new_tokens=40, ignore_eos=True),
    dict(prompt="nothing", max_new_tokens=0, prompt_logprobs=0),
    dict(prompt=WORDS, temperature=0.0, max_new_tokens=5, ignore_eos=True, prefix_key="salt", skip_special_tokens=False),
]


def facts(r):
    "What a request's answer is; logprobs rounded, since fp64 sums may differ in their last bits."
    lps = lambda ps: ps and [p and (p.token_id, p.token, round(p.logprob, 9), p.rank, {k: round(v, 9) for k, v in p.top.items()}) for p in ps]
    return r.error, r.stats.prompt_tokens, r.stats.generated_tokens, lps(r.prompt_logprobs), [
        (o.index, o.text, o.token_ids, o.finish_reason, o.stop_reason, lps(o.logprobs)) for o in r.outputs]


@pytest.fixture(scope="module")
def plain_runs():
    "Each request alone: K = 1, no prefix cache, a pool that is large enough."
    e = tiny_engine(prefix_cache=False, max_num_seqs=4, window_steps=1)
    out = [facts(e.run(**kw)) for kw in CROWD]
    e.unload()
    return out


CONFIGS = [
    dict(window_steps=1, max_num_seqs=16),
    dict(window_steps=8, max_in_flight=2, max_num_seqs=16, block=3),
    dict(window_steps=4, max_in_flight=2, max_num_seqs=5, block=1, max_num_batched_tokens=7),
    dict(window_steps=4, max_in_flight=2, max_num_seqs=16, block=4, blocks=33),                    # preempts
    dict(window_steps=8, max_in_flight=2, max_num_seqs=3, block=16, max_num_batched_tokens=20),
    dict(window_steps=1, max_num_seqs=16, block=4, blocks=33, prefix_cache=False),                 # preempts
    dict(window_steps=4, max_num_seqs=16, paged=False),
]


@pytest.mark.parametrize("cfg", CONFIGS, ids=lambda c: " ".join(f"{k}={v}" for k, v in c.items()))
def test_a_crowd_with_every_feature_gets_its_plain_answers_and_no_launch_reads_the_device(cfg, plain_runs, monkeypatch):
    launch = TorchRunner.launch
    def watched(self, plan):
        with NoSync(): return launch(self, plan)
    monkeypatch.setattr(TorchRunner, "launch", watched)   # joint 21
    e = tiny_engine(**cfg)
    for _ in range(2):                                    # the second time, prompts and decoded blocks are cached
        got = e.run_requests([GenerationRequest(**{"top_p": 0.9, "top_k": 50} | kw) for kw in CROWD * 2])
        for kw, r, want in zip(CROWD * 2, got, plain_runs * 2): assert facts(r) == want, kw
    settle(e)
    if cfg.get("blocks"): assert counters(e)["preemptions"] > 0
    assert not counters(e).get("engine_errors") and not counters(e).get("launch_errors")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_greedy_answers_and_logprobs_are_the_oracles(family):
    _, model, tok = tiny(family)
    e = engine_around(model, tok, window_steps=4, max_in_flight=2, block=4)
    r = e.run("Once upon a time", logprobs=5, max_new_tokens=20, **GREEDY)
    ids, full = r.prompt_token_ids + r.token_ids, model.logits(torch.tensor(r.prompt_token_ids + r.token_ids)).log_softmax(-1)
    for i, p in enumerate(r.logprobs, len(r.prompt_token_ids)):
        top = full[i - 1].topk(5)
        assert p.token_id == ids[i] == int(top.indices[0]) and p.rank == 1
        assert list(p.top) == top.indices.tolist() and np.allclose(list(p.top.values()), top.values, atol=1e-9) and abs(p.logprob - float(top.values[0])) < 1e-9


@pytest.mark.parametrize("n_prompt", [1, 15, 16, 17, 20])
def test_n_samples_are_n_separate_runs_and_one_prefill(n_prompt):
    _, model, tok = tiny()
    e = tiny_engine(window_steps=4, max_in_flight=2)
    prompt = tok.encode(WORDS * 2)[:n_prompt]
    r = GenerationRequest(prompt_token_ids=prompt, n=5, seed=11, temperature=1.1, max_new_tokens=30, ignore_eos=True)
    got = e.run_requests([r])[0]
    params = resolve_params(r, tok, model.config, n_prompt, 128, lambda: 0)
    assert [p.child for p in params] == list(range(5))
    alone = [generate(make_core(model, CoreConfig(prefix_cache=False, max_model_len=128)), [prompt], p)[0] for p in params]
    assert [o.token_ids for o in got.outputs] == alone and len({tuple(a) for a in alone}) == 5
    assert got.stats.generated_tokens == 150 and counters(e).get("prefill_tokens", 0) == (n_prompt if n_prompt > 1 else 0)   # a one-token prompt is a decode row
    assert e.run(prompt_token_ids=prompt, seed=11, temperature=1.1, max_new_tokens=30, ignore_eos=True).token_ids == alone[0]
    settle(e)


def test_the_prefix_example_hits_and_computes_only_the_tail():
    e = tiny_engine()
    system, computed, hits = WORDS * 2, [], []
    for question in ("first question", "second question"):
        before = counters(e).get("prefill_tokens", 0)
        r = e.run(system + question, prefix_key="system", max_new_tokens=4, **GREEDY)
        assert r.token_ids == oracle(r.prompt_token_ids, 4)
        computed.append(counters(e)["prefill_tokens"] - before)
        hits.append(r.stats.cache_hit)
    n, shared = r.stats.prompt_tokens, len(os.path.commonprefix([tiny()[2].encode(system + "first"), r.prompt_token_ids])) // 16 * 16
    assert hits == [False, True] and r.cached_tokens == shared >= 16 and computed[1] == n - shared
    s = e.cache_stats()
    assert (s["total_hits"], s["total_misses"], s["paged_reads"]) == (1, 1, shared) and s["prefix_hit_rate"] != "0.00%"
    assert e.run(system + question, prefix_key="another", max_new_tokens=1).cached_tokens == 0     # a salt separates
    assert e.run(system + question, prefix_key="system", max_new_tokens=1).cached_tokens == (n - 1) // 16 * 16


def test_a_second_turn_hits_decoded_blocks():
    tok = tiny()[2]
    answer = "I count: one, two, three, four, five, six, seven, eight, nine, ten, and then I begin again at one."
    first = tok.encode_chat([{"role": "user", "content": "Please count."}])
    second = tok.encode_chat([{"role": "user", "content": "Please count."}, {"role": "assistant", "content": answer}, {"role": "user", "content": "Go on."}])
    script = first + tok.encode(answer, add_special_tokens=False) + list(tok.eos_token_ids[:1])
    assert second[:len(script) - 1] == script[:-1]                      # the template writes the turn as the model did
    e = forced_engine([], scripts={first[0]: script}, block=4, window_steps=4, max_in_flight=2)
    a = e.chat([{"role": "user", "content": "Please count."}], temperature=0.0)
    assert a.generated_text == answer and a.finish_reason == "stop"
    b = e.run(prompt_token_ids=second, max_new_tokens=1)
    assert b.cached_tokens == (len(script) - 1) // 4 * 4 > len(first) + 20


@pytest.mark.parametrize("K, flight", [(1, 1), (4, 1), (8, 2)])
def test_a_stop_string_in_mid_window_ends_the_text_and_the_rest_never_happened(K, flight):
    answer = pieces(*"ABCDEFG") + list(range(30, 60))
    e = forced_engine([answer], block=2, window_steps=K, max_in_flight=flight)
    prompt = forced_prompt(0)
    for include in (False, True):
        r = e.run(prompt_token_ids=prompt, stop_sequences=["DE"], include_stop_str_in_output=include, logprobs=0, temperature=0.0)
        assert r.generated_text == ("ABCDE" if include else "ABC") and (r.finish_reason, r.outputs[0].stop_reason) == ("stop", "DE")
        assert r.token_ids == answer[:5] and r.stats.generated_tokens == len(r.logprobs) == 5          # the overshoot is not billed
        settle(e)
        assert pool_of(e).match(np.array(prompt + answer)).n_tokens in (6, 8)      # nor cached: 8 = 3 + 5, if a window has fed the last kept token
    chunks = list(e.stream(prompt_token_ids=prompt, stop_sequences=["DE"], temperature=0.0))
    assert "".join(c.token for c in chunks) == "ABC" and sum((c.token_ids for c in chunks), []) == answer[:5]


@pytest.mark.parametrize("K", [1, 8])
def test_a_stop_string_before_a_nan_wins_with_any_window(K):
    e = forced_engine([pieces("A", "B", "C", "D", "E")], window_steps=K, forced=dict(nan_at={300: 3 + 4}))
    r = e.run(prompt_token_ids=forced_prompt(0), stop_sequences=["C"], temperature=0.0)
    assert (r.generated_text, r.finish_reason, r.error) == ("AB", "stop", None)
    r = e.run(prompt_token_ids=forced_prompt(0), stop_sequences=["Q"], temperature=0.0)
    assert r.generated_text == "ABCD" and r.finish_reason == "error" and "not finite at token 7" in r.error


@pytest.mark.parametrize("K", [1, 4, 8])
def test_64_requests_on_40_blocks(K):
    rng, n = random.Random(1), 64
    answers = [[rng.randrange(3, 300) for _ in range(rng.randrange(20, 60))] for _ in range(n)]
    e = forced_engine(answers, block=4, blocks=41, max_num_seqs=24, window_steps=K, max_in_flight=2, max_model_len=64)
    lengths = [rng.randrange(1, 20) for _ in range(n)]
    results = e.run_requests([GenerationRequest(prompt_token_ids=forced_prompt(i, m)[:m], temperature=0.0, max_new_tokens=None) for i, m in enumerate(lengths)])
    model = paged(e).model
    for i, (m, r) in enumerate(zip(lengths, results)):
        want = model.expected(forced_prompt(i, m), 64 - m)
        assert r.error is None and r.token_ids == want[:len(r.token_ids)] and (r.finish_reason == "stop" or len(r.token_ids) == 64 - m)
    assert counters(e)["preemptions"] > 3
    settle(e)


def test_10000_random_actions_leave_no_block_and_no_wrong_token():
    rng, eos = random.Random(7), tiny()[2].eos_token_ids[0]
    e = forced_engine([], block=4, blocks=64, max_num_seqs=12, window_steps=4, max_in_flight=2, max_num_batched_tokens=40, max_model_len=64)
    b, live, done, actions = paged(e), [], [], 0
    model, loop = b.model, b.loop
    def balance(): loop.core.scheduler.pool.check()
    with inject("core.plan", balance, times=10**9) as seen:
        while actions < 10_000:
            kind = rng.choices(("submit", "abort", "twice", "read", "wait"), (5, 2, 1, 3, 0.3))[0]
            if kind == "submit" and len(live) < 60:
                prompt = [rng.randrange(3, 40), *(rng.randrange(3, 9) for _ in range(rng.randrange(0, 30)))]
                stop = [tiny()[2].token_text(rng.randrange(30, 200))] if rng.random() < 0.3 else None
                r = GenerationRequest(prompt_token_ids=prompt, max_new_tokens=rng.randrange(0, 30), temperature=0.0, stop_sequences=stop,
                    n=rng.choice((1, 1, 1, 3)), priority=rng.randrange(2), deadline_s=rng.choice((None, None, None, 0.0, 0.01)))
                live.append((b.submit(r, stream=rng.random() < 0.5), prompt))
            elif live:
                h, prompt = live[rng.randrange(len(live))]
                if kind in ("abort", "twice"):
                    h.cancel()
                    if kind == "twice": h.cancel()
                elif kind == "wait": h.finished.wait(5)
                elif not h.chunks.empty(): h.chunks.get()
            done += [x for x in live if x[0].finished.is_set()]
            live = [x for x in live if not x[0].finished.is_set()]
            actions += 1
        for h, _ in live: h.finished.wait(10)
    reasons = set()
    for h, prompt in done + live:
        want = model.expected(prompt, 64)
        for s in h.samples:
            assert s.token_ids == want[:len(s.token_ids)] and h.error is None and eos not in s.token_ids[:-1]
            assert s.finish_reason != "length" or len(s.token_ids) == min(h.request.max_new_tokens, 64 - len(prompt))
            reasons.add((s.finish_reason, type(s.stop_reason)))
    assert len(done) > 1000 and seen[0] > 1000 and {"stop", "length", "abort"} <= {r for r, _ in reasons} and ("stop", str) in reasons
    assert not counters(e).get("engine_errors")
    settle(e)


# Errors, each to its own caller


def test_run_batch_reports_each_error_in_its_own_place(monkeypatch):
    e = tiny_engine(max_model_len=32)
    good = e.run("fine", max_new_tokens=3, **GREEDY).token_ids
    rs = e.run_requests([GenerationRequest("fine", max_new_tokens=3, **GREEDY), GenerationRequest(""), GenerationRequest("x", temperature=float("nan")),
        GenerationRequest("too long " * 50), GenerationRequest("x", force_words=["y" * 60], max_new_tokens=3), GenerationRequest(prompt_token_ids=[1, 512]), GenerationRequest("fine", max_new_tokens=3, **GREEDY)])
    assert [r.error is None for r in rs] == [True, False, False, False, False, False, True] and all(r.finish_reason == "error" for r in rs if r.error)
    for word, r in zip(("prompt is empty", "temperature", "the context holds 32", "force_words", "512"), rs[1:6]): assert word in r.error
    assert rs[0].token_ids == rs[6].token_ids == good
    encode = type(paged(e).tokenizer).encode
    def fails(self, text, **kw):
        if "bomb" in text: raise RuntimeError("the tokenizer broke")
        return encode(self, text, **kw)
    monkeypatch.setattr(type(paged(e).tokenizer), "encode", fails)
    rs = e.run_batch(["fine", "a bomb", "fine"], max_new_tokens=3, **GREEDY)
    assert [r.token_ids for r in rs] == [good, [], good] and "the tokenizer broke" in rs[1].error
    assert e.run_requests([]) == [] and e.run_batch([]) == []
    with pytest.raises(RequestError, match="list of prompts"): e.run_batch("fine")
    with pytest.raises(TypeError, match="GenerationRequest objects"): e.run_requests(["fine"])
    for wrong, hint in (("max_tokens", "did you mean max_new_tokens"), ("stop", "did you mean stop_sequences"), ("max_completion_tokens", "did you mean max_new_tokens"), ("top_logprobs", "did you mean logprobs"),
                        ("temprature", "did you mean temperature"), ("device", "give it to EngineConfig"), ("zzz", "see the fields of GenerationRequest")):
        with pytest.raises(TypeError, match=f"^unknown generation argument '{wrong}': .*{hint}") as err: e.run("x", **{wrong: 3})
        assert len(str(err.value)) < 110
    with pytest.raises(RequestError, match="messages must be a list"): e.chat(None)
    settle(e)


def test_odd_but_valid_values_are_taken():
    e = tiny_engine()
    want = e.run("Hello", max_new_tokens=4, **GREEDY).token_ids
    ids = np.array(tiny()[2].encode("Hello"))
    for kw in (dict(prompt_token_ids=ids), dict(prompt_token_ids=tuple(ids.tolist())), dict(prompt="Hello", seed=np.int64(-1), top_k=np.int32(5), n=np.int64(1)),
               dict(prompt="Hello", stop_token_ids=np.array([511, 510]), logit_bias={np.int64(511): np.float32(-1)}, stop_sequences=(), bad_words=[" "]),
               dict(prompt="Hello", stop_sequences=np.array(["@@@", "%%%"]), bad_words=np.array(["qqqq", "zzzz"]), temperature=np.float32(0))):
        r = e.run(**GREEDY | dict(max_new_tokens=np.int64(4)) | kw)
        assert r.token_ids == want and all(type(i) is int for i in r.token_ids)


@pytest.mark.parametrize("arrival", ["soon", float("nan"), None])
def test_a_broken_arrival_time_is_refused(arrival):
    e = tiny_engine()
    with pytest.raises(RequestError, match="arrival_time"): e.run("x", arrival_time=arrival, max_new_tokens=1)
    assert e.run("x", max_new_tokens=1).error is None


def crowd_of(e, n=6, **kw):
    "Running streams of a forced engine, each with its first token read."
    ss = [e.stream(prompt_token_ids=forced_prompt(i), **{"temperature": 0.0, "max_new_tokens": 60} | kw) for i in range(n)]
    return ss, [next(s) for s in ss]


@pytest.mark.parametrize("point, engine_dies", [("runner.launch", False), ("model.forward", False), ("ticket.harvest", True), ("core.plan", True)])
def test_a_fault_anywhere_reaches_every_waiter_and_the_next_request_works(point, engine_dies, caplog):
    e = forced_engine([[50 + i] * 40 for i in range(6)], window_steps=4, max_in_flight=2, speculative_num_assistant_tokens=0)   # guesses would end it too soon
    good = e.run(prompt_token_ids=forced_prompt(0), temperature=0.0).token_ids
    for after in (0, 1, 5):
        with inject("core.plan", lambda: time.sleep(0.05)): ss, _ = crowd_of(e)
        t = time.monotonic()
        with inject(point, ValueError("a cable was pulled"), after=after) as seen: ends = [drain(s) for s in ss]
        assert seen[1] and any(err for _, err in ends) and time.monotonic() - t < 5
        assert all(err is None or "ValueError: a cable was pulled" in err for _, err in ends)
        assert e.run(prompt_token_ids=forced_prompt(0), temperature=0.0).token_ids == good
        settle(e)
    assert counters(e).get("engine_errors", 0) == (3 if engine_dies else 0) and counters(e).get("launch_errors", 0) == (0 if engine_dies else 3)
    assert len(caplog.records) == (3 if engine_dies else 0)              # no hidden fallback: one line each


@pytest.mark.parametrize("exc", [SystemExit, KeyboardInterrupt, MemoryError])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_even_if_the_engine_thread_is_killed_nobody_waits_and_the_next_call_revives_it(exc):
    e = forced_engine([[50] * 40])
    s = e.stream(prompt_token_ids=forced_prompt(0), temperature=0.0)
    next(s)
    with inject("ticket.harvest", exc("killed")): text, error = drain(s)
    assert exc.__name__ in error
    r = e.run(prompt_token_ids=forced_prompt(0), temperature=0.0)
    assert r.error is None and r.token_ids[:-1] == [50] * 40


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_core_that_cannot_be_rebuilt_ends_the_thread_and_says_so():
    e = forced_engine([[50] * 40])
    s = e.stream(prompt_token_ids=forced_prompt(0), temperature=0.0)
    next(s)
    loop = paged(e).loop
    def no_memory(): raise MemoryError("no room for a pool")
    loop.make = no_memory
    with inject("ticket.harvest", RuntimeError("gone")): assert "RuntimeError: gone" in drain(s)[1]
    loop.thread.join(5)
    assert not e.info()["loaded"] and e.cache_stats() == {}
    assert e.run(prompt_token_ids=forced_prompt(0), temperature=0.0).token_ids[:-1] == [50] * 40    # a new thread, the same weights


def test_a_stop_string_before_the_prompts_scores_waits_for_them(monkeypatch):
    "Harvests in mid-window bring tokens before the scores of the chunk that made them."
    import llminfer.paged as B
    limits = B.pool_limits

    def piecemeal(*a):
        out = limits(*a)
        out.follow, out.reveal = True, 1
        return out
    kw = dict(prompt="the poolthe ", prompt_logprobs=0, stop_sequences=[" ", "e", "a", "t", "o", "s", "i", "n"], max_new_tokens=40, ignore_eos=True, temperature=1.5)
    plain = tiny_engine()
    want = [plain.run(seed=i, **kw) for i in range(12)]
    monkeypatch.setattr(B, "pool_limits", piecemeal)
    e = tiny_engine(window_steps=8, max_in_flight=2)
    got = [e.run(seed=i, **kw) for i in range(12)]
    assert [facts(r) for r in got] == [facts(r) for r in want] and all(r.prompt_logprobs for r in got)
    assert any(r.finish_reason == "stop" and len(r.token_ids) <= 4 for r in got)
    settle(e)


def test_a_nan_row_does_not_poison_its_neighbours():
    answers = [[50 + i] * 20 for i in range(6)]
    for K in (1, 8):
        e = forced_engine(answers, window_steps=K, forced=dict(nan_at={302: 3 + 7, 304: 3}))
        rs = e.run_requests([GenerationRequest(prompt_token_ids=forced_prompt(i), temperature=t, seed=1, top_k=1) for t in (0.0, 1.0) for i in range(6)])
        for i, r in enumerate(rs):
            bad = {2: 7, 4: 0}.get(i % 6)
            assert r.token_ids == (answers[i % 6] + [tiny()[2].eos_token_ids[0]])[:bad] and (r.finish_reason == "error") == (bad is not None)
            if bad is not None: assert f"not finite at token {3 + bad}" in r.error
        settle(e)


def test_a_callback_that_raises_costs_only_its_own_request():
    e = forced_engine([[50 + i] * 40 for i in range(3)])
    def broken(chunk): raise OSError("nobody listens")
    hs = [paged(e).submit(GenerationRequest(prompt_token_ids=forced_prompt(i), temperature=0.0, n=2), notify=broken if i == 1 else None, stream=True) for i in range(3)]
    assert all(h.finished.wait(5) for h in hs)
    assert [h.samples[0].finish_reason for h in hs] == ["stop", "abort", "stop"] and not counters(e).get("engine_errors")
    settle(e)


# Leaving early


def test_settings_that_bound_memory():
    _, model, tok = tiny()
    def limits(**kw):
        e = engine_around(model, tok, **kw)
        info = e.info()
        e.unload()
        return info["max_model_len"], info["num_blocks"], info["max_num_seqs"], info["max_num_batched_tokens"]
    assert limits() == (128, 1 + 16 * 8, 16, 512)
    assert limits(max_model_len=None, blocks=11) == (160, 11, 16, 512)         # the context shrinks to the pool
    assert limits(max_num_batched_tokens=5, max_num_seqs=700, max_model_len=32)[2:] == (700, 5)
    assert limits(max_num_seqs=700, max_model_len=32)[2:] == (700, 700)
    for kw, word in ((dict(blocks=8), "cannot hold one sequence of max_model_len 128"), (dict(max_model_len=513), "512 positions")):
        with pytest.raises(ConfigError, match=word): engine_around(model, tok, **kw)
    for kw in (dict(tensor_parallel_size=3), dict(assistant_model_name="x")):
        with pytest.raises(ConfigError, match=next(iter(kw))): InferenceEngine(EngineConfig(model_name=tiny()[0], **kw)).load()
    for cfg, how in (("demo", r"EngineConfig\(model_name='demo'\)"), (tiny()[0], r"EngineConfig\(model_name='/.*'\)"), ({"model_name": "demo"}, r"EngineConfig\(\*\*settings\)"), (0, "EngineConfig")):
        with pytest.raises(ConfigError, match=f"pass {how}"): InferenceEngine(cfg)


def test_info_and_cache_stats_have_the_contracts_keys():
    e = tiny_engine()
    assert e.info().keys() >= {"model", "backend", "quantization", "assistant_model", "device", "tensor_parallel_size", "pipeline_parallel_size", "max_batch_size",
        "batch_timeout_ms", "paged_kv_enabled", "hf_revision", "hf_local_files_only", "compile_fullgraph", "compile_cudagraphs",
        "speculative_num_assistant_tokens", "speculative_confidence_threshold", "loaded"}
    assert e.cache_stats().keys() >= {"active_seqs", "prefix_entries", "prefix_hit_rate", "total_hits", "total_misses", "paged_kv_enabled", "page_size_tokens",
        "active_paged_entries", "prefix_paged_entries", "active_pages", "prefix_pages", "paged_reads"}
    e.unload()
    assert e.info()["loaded"] is False and e.cache_stats() == {}
    with tiny_engine() as f: f.warmup()
    assert not f.info()["loaded"]


def test_seeds_of_unseeded_requests_come_from_the_engines_seed():
    texts = []
    for seed in (5, 5, 6):
        e = tiny_engine(seed=seed)
        texts.append([e.run("Hello", max_new_tokens=12, temperature=1.0).token_ids for _ in range(3)])
        e.unload()
    assert texts[0] == texts[1] != texts[2] and len({tuple(t) for t in texts[0]}) == 3
