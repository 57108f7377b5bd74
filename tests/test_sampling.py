"The batched sampler against transformers' processors, exact distributions, plain Philox, and the rule that launch reads nothing."
from __future__ import annotations
import math
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (MinNewTokensLengthLogitsProcessor, MinPLogitsWarper, NoBadWordsLogitsProcessor, NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)
from llminfer.interfaces import RowInit, Variant, variant_of
from llminfer.masks import set_ids
from llminfer.request import RequestError, SamplingParams as P
from llminfer.sampling import MOST, Noise, SamplerState, check_ids, check_lists, draw, gumbel, philox, ranked, survivors, token_logprobs, _Race

LOW = 2**32 - 1
NEG = float("-inf")

class NoSync(TorchDispatchMode):
    "Refuse every operation that waits for a device or depends on the values of a tensor."
    BAD = {"_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "equal", "is_nonzero", "item"}
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.__name__.split(".")[0] not in self.BAD, f"reads the device: {func}"
        return func(*args, **(kwargs or {}))

def cover(params):
    v = Variant()
    for p in params: v = v.join(variant_of(p))
    return v

class Bench:
    "A sampler with rows, their ids and a history, as the runner keeps them."
    def __init__(self, params, V=64, ids=None, n_prompt=4, dtype=torch.float32, max_rows=None, seed=0):
        g = np.random.default_rng(seed)
        self.params, self.V, self.n_prompt = params, V, n_prompt
        self.ids = [list(map(int, g.integers(0, V, n_prompt + 8))) for _ in params] if ids is None else [list(i) for i in ids]
        self.state = SamplerState(max_rows or len(params), V, "cpu", dtype)
        self.history = torch.full((self.state.max_rows, 256), 0, dtype=torch.int32)
        self.init(range(len(params)))

    def init(self, rows):
        self.state.init_rows([RowInit(r, 0, self.params[r], np.array(self.ids[r], np.int32), self.n_prompt, 256) for r in rows])
        for r in rows: self.history[r, :len(self.ids[r])] = torch.tensor(self.ids[r], dtype=torch.int32)

    def args(self, rows):
        return torch.tensor(rows), torch.tensor([len(self.ids[r]) for r in rows]), self.history, cover([self.params[r] for r in rows])

    def adjust(self, logits, rows=None):
        rows = list(range(len(self.params))) if rows is None else rows
        x = logits.clone()
        with NoSync(): self.state.adjust(x, *self.args(rows))
        return x

    def step(self, logits, rows=None):
        rows = list(range(len(self.params))) if rows is None else rows
        with NoSync():
            r, n, h, v = self.args(rows)
            out = self.state.sample(logits, r, n, h, v)
            self.state.update(r, out.tokens, torch.ones(len(rows), dtype=torch.bool))
        for r, t in zip(rows, out.tokens.tolist()):
            self.history[r, len(self.ids[r])] = t; self.ids[r].append(t)
        return out

def plain_philox(c, k):
    c, k = list(c), list(k)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & LOW, (a >> 32) ^ c[3] ^ k[1], a & LOW]
        k = [(k[0] + 0x9E3779B9) & LOW, (k[1] + 0xBB67AE85) & LOW]
    return c

# ---- random numbers

@pytest.mark.parametrize("counter,key,want", [
    ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((LOW,) * 4, (LOW,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ((0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344), (0xa4093822, 0x299f31d0), "d16cfe09 94fdcceb 5001e420 24126ea1")])
def test_philox_known_answers(counter, key, want):
    got = philox([torch.tensor(c) for c in counter], (torch.tensor(key[0]), torch.tensor(key[1])))
    assert " ".join(f"{w:08x}" for w in got.tolist()) == want

def test_noise_is_the_documented_function_of_seed_child_position_and_id():
    g = np.random.default_rng(0)
    B, V = 5, 70
    seeds, child, pos = [int(s) for s in g.integers(0, 2**64, B, dtype=np.uint64)], g.integers(0, 128, B), g.integers(0, 2**31, B)
    noise = Noise((torch.tensor([s & LOW for s in seeds]), torch.tensor([s >> 32 for s in seeds])), torch.tensor(child), torch.tensor(pos), stream=3)
    whole = noise.all(V)
    words = [[plain_philox((int(pos[b]), int(child[b]), i // 4, 3), (seeds[b] & LOW, seeds[b] >> 32))[i % 4] for i in range(V)] for b in range(B)]
    want = [[-math.log(-math.log1p(-min((w + 0.5) / 2**32, 1 - 2**-24))) for w in row] for row in words]
    torch.testing.assert_close(whole.double(), torch.tensor(want, dtype=torch.float64), atol=2e-5, rtol=1e-5)
    ids = torch.tensor(g.integers(0, V, (B, 9)))
    assert torch.equal(noise.at(ids), whole.gather(1, ids))
    assert torch.equal(noise.all(V, 12), whole[:, 12:])
    assert gumbel(torch.tensor([0, 1, LOW - 1, LOW])).isfinite().all()

def test_seed_child_position_and_stream_each_change_the_noise():
    def one(seed=1, high=0, child=0, pos=0, stream=0):
        return Noise((torch.tensor([seed]), torch.tensor([high])), torch.tensor([child]), torch.tensor([pos]), stream).all(4000)[0]
    all_ = [one(), one(seed=2), one(high=1), one(child=1), one(pos=1), one(stream=1), one(child=2, pos=0), one(pos=2)]
    for i in range(len(all_)):
        for j in range(i): assert abs(torch.corrcoef(torch.stack((all_[i], all_[j])))[0, 1]) < 0.06
    assert abs(one().mean() - 0.5772) < 0.08 and abs(one().var() - math.pi**2 / 6) < 0.2
    states = [P(seed=-1), P(seed=2**64 - 1), P(seed=2**63), P(seed=0)]   # any 64-bit seed, signed or not
    t = [Bench([p], V=500).step(torch.zeros(1, 500)).tokens.item() for p in states]
    assert t[0] == t[1] and len(set(t)) == 3

# ---- order, ties, survivors

@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ranked_is_a_total_order(dtype):
    g = torch.Generator().manual_seed(0)
    x = torch.randint(-6, 6, (4, 300), generator=g).to(dtype) / 2
    x[:, ::17] = NEG; x[1, 5], x[1, 6] = -0.0, 0.0
    want = torch.tensor([sorted(range(300), key=lambda i: (-x[b, i].item(), i)) for b in range(4)])
    for w in (1, 7, 150, 299, 300):
        v, ids = ranked(x, w)
        assert torch.equal(ids, want[:, :w]) and torch.equal(v, x.gather(1, ids))
    y = torch.randn(3, 5000, generator=g).to(dtype)
    for w in (5, 200, 5000): assert torch.equal(ranked(y, w)[0], y.sort(-1, descending=True).values[:, :w])

@pytest.mark.parametrize("temperature,k,p,min_p", [(1.0, 5, 1.0, 0.0), (0.7, 0, 0.8, 0.0), (1.3, 20, 0.9, 0.0), (0.9, 0, 1.0, 0.1), (1.5, 30, 0.95, 0.05), (2.0, 0, 0.5, 0.02)])
def test_survivors_equal_transformers(temperature, k, p, min_p):
    x = torch.randn(16, 400, generator=torch.Generator().manual_seed(1)) * 2
    ref = TemperatureLogitsWarper(temperature)(None, x)
    if k: ref = TopKLogitsWarper(k)(None, ref)
    if p < 1: ref = TopPLogitsWarper(p)(None, ref)
    if min_p: ref = MinPLogitsWarper(min_p)(None, ref)
    v, ids = ranked(x, 400)
    col = lambda c: torch.full((16, 1), c)
    y, keep = survivors(v, col(temperature), col(k or 400), col(p if p < 1 else 2.0), col(math.log(min_p) if min_p else NEG))
    assert torch.equal(torch.zeros(16, 400, dtype=torch.bool).scatter(1, ids, keep), ref > NEG)
    torch.testing.assert_close(y, (v - v[:, :1]) / temperature)

SETTINGS = [P(temperature=0), P(), P(top_k=3), P(top_k=40, top_p=0.9), P(top_p=0.5), P(top_p=0.95, temperature=1.7), P(min_p=0.1),
    P(top_p=0.8, min_p=0.05, temperature=0.6), P(top_k=10**7), P(top_k=1), P(top_p=1e-9), P(top_k=7, min_p=0.3, temperature=2.0)]

def exact_distribution(logits, p):
    "Probabilities by transformers' warpers, in fp64."
    x = logits.double()[None]
    if p.greedy: return torch.zeros_like(x[0]).index_fill(0, x[0].argmax(), 1.0)
    x = TemperatureLogitsWarper(p.temperature)(None, x)
    if 0 < p.top_k < x.shape[1]: x = TopKLogitsWarper(p.top_k)(None, x)
    if p.top_p < 1: x = TopPLogitsWarper(p.top_p)(None, x)
    if p.min_p > 0: x = MinPLogitsWarper(p.min_p)(None, x)
    return x[0].softmax(-1)

@pytest.mark.parametrize("V,scale,n", [(50, 1.5, 4000), (3000, 0.7, 1500)])
def test_draws_follow_the_exact_distribution(V, scale, n):
    "Chi-square over n positions; V 3,000 and flat logits make top-p leave the 1,024 fast candidates."
    logits = torch.randn(V, generator=torch.Generator().manual_seed(2)) * scale
    for p in SETTINGS:
        state = SamplerState(1, V); state.init_rows([RowInit(0, 0, p, np.zeros(1, np.int32), 1, 9)])
        tokens = torch.cat([state.sample(logits.expand(500, V), torch.zeros(500, dtype=torch.int64), torch.arange(i, i + 500),
            torch.zeros(1, 8, dtype=torch.int32), variant_of(p)).tokens for i in range(0, n, 500)])
        want, seen = exact_distribution(logits, p), tokens.bincount(minlength=V).double()
        assert (seen[want == 0] == 0).all(), p
        order = want.argsort(descending=True)                            # pool rare words so that every cell expects at least 20
        cell = torch.minimum((want[order].cumsum(0) - want[order]) * n // 20, torch.tensor(n // 20 - 1)).long()
        e, o = (torch.zeros(n // 20, dtype=torch.float64).scatter_add(0, cell, t[order]) for t in (want * n, seen))
        e, o = e[e > 0], o[e > 0]
        chi2, dof = ((o - e) ** 2 / e).sum().item(), len(e) - 1
        assert chi2 <= dof + 4.5 * math.sqrt(2 * dof) + 1e-9, (p, chi2, dof)

def test_a_row_draws_the_same_alone_in_any_batch_and_on_the_gpu_path():
    "Every way of drawing (whole vocabulary, candidates, sorted, with a neighbour's larger k) gives one answer."
    V = 3000
    for seed, scale in ((3, 0.5), (4, 4.0)):
        g = torch.Generator().manual_seed(seed)
        params = [P(**{**vars(p), "seed": i + 10, "child": i % 3}) for i, p in enumerate(SETTINGS)] + [P(top_k=900, seed=5), P(top_k=2999, top_p=0.7, seed=6)]
        logits = torch.randn(len(params), V, generator=g) * scale
        logits[:, ::3] = (logits[:, ::3] * 4).round() / 4                # many ties, as a bf16 head makes them
        bench = Bench(params, V)
        rows, n, hist, v = bench.args(list(range(len(params))))
        for at in (5, 6):
            pos = torch.full_like(n, at)
            mixed = bench.state.sample(logits, rows, pos, hist, v).tokens
            race = _Race(logits, bench.state.ints, bench.state.floats, pos, v)
            assert torch.equal(torch.where(bench.state.ints[:, 6] > 0, logits.argmax(-1), draw(race)), mixed)
            for r, p in enumerate(params):
                alone = bench.state.sample(logits[r:r + 1], rows[r:r + 1], pos[r:r + 1], hist, variant_of(p)).tokens
                assert alone.item() == mixed[r].item(), p
                one = _Race(logits[r:r + 1], bench.state.ints[r:r + 1], bench.state.floats[r:r + 1], pos[r:r + 1], variant_of(p))
                if not p.greedy: assert draw(one).item() == mixed[r].item(), p
            pair = bench.state.sample(logits[[7, 2]], torch.tensor([7, 2]), pos[:2], hist, cover([params[7], params[2]])).tokens
            assert pair.tolist() == mixed[[7, 2]].tolist()
            assert mixed[0] == logits[0].argmax() and mixed[9] == logits[9].argmax() and mixed[10] == logits[10].argmax()

def test_float64_logits_draw_what_float32_logits_draw():
    params = [P(**{**vars(p), "seed": i}) for i, p in enumerate(SETTINGS)]
    logits = torch.randn(len(params), 2000, generator=torch.Generator().manual_seed(9))
    a, b = Bench(params, 2000), Bench(params, 2000, dtype=torch.float64)
    assert torch.equal(a.step(logits).tokens, b.step(logits.double()).tokens)

# ---- penalties and bans against transformers

def test_penalties_equal_transformers_and_openai():
    params = [P(repetition_penalty=1.3), P(), P(presence_penalty=0.7), P(frequency_penalty=-0.4), P(repetition_penalty=0.6, presence_penalty=-1.0, frequency_penalty=1.1)]
    bench = Bench(params, V=12)
    g = torch.Generator().manual_seed(0)
    for step in range(10):
        if step == 6: bench.init([4, 0])                                   # preempted: counts are rebuilt from ids
        logits = torch.randn(5, 12, generator=g) * 2
        got = bench.adjust(logits)
        for r, p in enumerate(params):
            want = RepetitionPenaltyLogitsProcessor(p.repetition_penalty)(torch.tensor([bench.ids[r]]), logits[r:r + 1].clone())[0]
            count = torch.tensor(bench.ids[r][bench.n_prompt:]).bincount(minlength=12)
            want = want - p.frequency_penalty * count - p.presence_penalty * (count > 0)
            torch.testing.assert_close(got[r], want)
        some = [r for r in range(5) if r != step % 5]
        bench.step(logits[some], some)
    rows, emit = torch.tensor([0, 0, 2]), torch.tensor([False, False, True])    # padding rows repeat a row and emit nothing
    before = bench.state.counts.data.clone()
    bench.state.update(rows, torch.tensor([3, 3, 4]), emit)
    change = bench.state.counts.data - before
    assert change.sum() == 2 and change[2, 4] == 2

def test_ngram_bans_equal_transformers():
    params = [P(no_repeat_ngram_size=n) for n in (0, 1, 2, 3, 4, 7, 60, 2**20)]
    g = torch.Generator().manual_seed(0)
    bench = Bench(params, V=5, ids=[torch.randint(0, 5, (i % 3 + 1,), generator=g).tolist() for i in range(8)], n_prompt=1)
    banned = 0
    for _ in range(40):
        logits = torch.randn(8, 5, generator=g)
        got = bench.adjust(logits)
        for r, p in enumerate(params):
            n = p.no_repeat_ngram_size
            want = NoRepeatNGramLogitsProcessor(n)(torch.tensor([bench.ids[r]]), logits[r:r + 1].clone())[0] if n else logits[r]
            assert torch.equal(got[r], want), (n, bench.ids[r]); banned += (want == NEG).sum().item()
        for r in range(8):
            t = int(torch.randint(0, 5, (), generator=g)); bench.history[r, len(bench.ids[r])] = t; bench.ids[r].append(t)
    assert banned > 300

def test_bad_words_equal_transformers():
    words = [((3,), (1, 2), (0, 1, 2)), (), ((4, 4, 4, 4, 0), (2, 0)), ((0,), (1,), (2, 3), (2, 4), (1, 3))]
    params = [P(bad_words_ids=w) for w in words]
    g = torch.Generator().manual_seed(0)
    bench = Bench(params, V=5, ids=[[0] * 6] * 4, n_prompt=6)
    for _ in range(60):
        logits = torch.randn(4, 5, generator=g)
        got = bench.adjust(logits)
        for r, w in enumerate(words):
            want = NoBadWordsLogitsProcessor([list(i) for i in w])(torch.tensor([bench.ids[r]]), logits[r:r + 1].clone())[0] if w else logits[r]
            assert torch.equal(got[r], want), (w, bench.ids[r])
        for r in range(4):
            t = int(torch.randint(0, 5, (), generator=g)); bench.history[r, len(bench.ids[r])] = t; bench.ids[r].append(t)
    wide = Bench([P(bad_words_ids=tuple((i, i + 1, i + 2, i + 3, i + 4, i + 5) for i in range(40)))], V=50, ids=[[7, 8, 9, 10, 11]], n_prompt=5)
    assert (wide.adjust(torch.zeros(1, 50)) == NEG).nonzero().tolist() == [[0, 12]]     # tables grew in both directions

def test_min_tokens_two_eos_ids_and_a_bias_of_100():
    "B03: no end before min_tokens, counted from the prompt's end; the last vocabulary entry keeps its logit with no stop id at all."
    V, eos = 30, (5, 9)
    params = [P(temperature=0, min_tokens=8, stop_ids=(*eos, 11), eos_ids=eos, logit_bias=((5, 100.0), (9, 99.0))),
        P(temperature=1.0, min_tokens=8, stop_ids=eos, eos_ids=eos, logit_bias=((9, 100.0),)), P(temperature=0, min_tokens=8)]
    bench = Bench(params, V, ids=[list(range(10, 30))] * 3, n_prompt=20)
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(0))
    want = MinNewTokensLengthLogitsProcessor(20, 8, list(eos) + [11])(torch.tensor([bench.ids[0]]), logits[:1].clone())[0] > NEG
    assert torch.equal(bench.adjust(logits)[0] > NEG, want)
    assert torch.equal(bench.adjust(logits)[2], logits[2])
    for _ in range(9): bench.step(logits)
    for r, end in ((0, 5), (1, 9)):
        out = bench.ids[r][20:]
        assert not set(out[:8]) & set(params[r].stop_ids) and out[8] == end
    is_eos, is_stop = bench.state.ends(torch.tensor([0, 0, 0, 1, 2]), torch.tensor([9, 11, 29, 11, 29]))
    assert is_eos.tolist() == [True, False, False, False, False] and is_stop.tolist() == [False, True, False, False, False]

def test_bias_is_added_to_the_raw_logit_before_penalties():
    bench = Bench([P(logit_bias=((0, -5.0), (63, 2.5)), repetition_penalty=2.0), P()], ids=[[0, 63, 1], [2, 2, 2]], n_prompt=3)
    got = bench.adjust(torch.ones(2, 64))
    assert got[0, 0] == -8 and got[0, 63] == 1.75 and got[0, 1] == 0.5 and (got[1] == 1).all()

def test_a_new_owner_inherits_nothing():
    old = P(logit_bias=tuple((i, 3.0) for i in range(40)), bad_words_ids=((1,), (2, 3)), repetition_penalty=2.0, presence_penalty=1.0,
        no_repeat_ngram_size=1, min_tokens=50, stop_ids=tuple(range(20)), eos_ids=(1,), temperature=0, top_k=3)
    bench = Bench([old, P(temperature=0)])
    logits = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    bench.step(logits)
    everything = cover([old, P(repetition_penalty=1.1)])
    for new in (P(temperature=0), P(temperature=0, repetition_penalty=1.5), P(temperature=0, logit_bias=((3, 1.0),), stop_ids=(7,))):
        bench.params[0], bench.ids[0] = new, [40, 41, 42]; bench.init([0])
        fresh = Bench([new, P(temperature=0)], ids=[[40, 41, 42], bench.ids[1]], n_prompt=3)
        x, y = logits.clone(), logits.clone()
        r, n, h, _ = bench.args([0, 1])
        bench.state.adjust(x, r, n, h, everything); fresh.state.adjust(y, r, n, fresh.history, everything)
        assert torch.equal(x, y)
        every = torch.arange(64)
        assert all(torch.equal(a, b) for a, b in zip(bench.state.ends(torch.zeros_like(every), every), fresh.state.ends(torch.zeros_like(every), every)))

def test_tables_cost_nothing_until_used_and_moves_are_counted():
    s = SamplerState(4, 1000)
    s.init_rows([RowInit(0, 0, P(), np.zeros(3, np.int32), 3, 9)])
    assert [t.data for t in (s.stop_ids, s.bias_ids, s.bias, s.words, s.counts)] == [None] * 5 and s.version == 0
    s.init_rows([RowInit(1, 0, P(repetition_penalty=1.2, stop_ids=(3,)), np.zeros(3, np.int32), 3, 9)]); assert s.version == 1
    s.init_rows([RowInit(1, 0, P(stop_ids=tuple(range(8))), np.zeros(3, np.int32), 3, 9)]); assert s.version == 1
    s.init_rows([RowInit(2, 0, P(stop_ids=tuple(range(9))), np.zeros(3, np.int32), 3, 9)]); assert s.version == 2
    assert s.ends(torch.tensor([1, 2, 3]), torch.tensor([7, 8, 0]))[1].tolist() == [True, True, False]
    s.init_rows([])

def test_tables_are_as_large_as_their_lists_and_shrink_again():
    "B4: 1,000 phrases and one of 10,000 ids took 11 GB, for ever; now their ids stand in a line, and what can never match is left out."
    phrases = tuple((i % 50, 7, i % 11) for i in range(1000))
    rows = [P(bad_words_ids=phrases + (tuple(range(50)) * 200,), stop_ids=tuple(range(900)), logit_bias=tuple((i, 1.0) for i in range(900))), P(bad_words_ids=((9, 3),))]
    bench = Bench(rows, V=1000, ids=[[5, 1, 7]] * 2, n_prompt=3)
    tables = [getattr(bench.state, n) for n in ("words", "bias", "bias_ids", "stop_ids")]
    assert [t.width for t in tables] == [3000, 900, 900, 900] and sum(t.data.nbytes for t in tables) < 150_000
    banned = bench.adjust(torch.zeros(2, 1000)) == NEG
    assert set(banned[0].nonzero().flatten().tolist()) == {w[2] for w in phrases if w[:2] == (1, 7)} and not banned[1].any()
    bench.params[0], version = P(), bench.state.version; bench.init([0])
    assert [t.width for t in tables] == [32, 32, 32, 8] and bench.state.version == version + 1
    bench.history[1, :3] = torch.tensor([5, 1, 9]); bench.ids[1] = [5, 1, 9]
    assert (bench.adjust(torch.zeros(2, 1000)) == NEG).nonzero().tolist() == [[1, 3]]
    fits = dict(logit_bias=tuple((i, 0.0) for i in range(MOST["logit_bias"])), stop_ids=tuple(range(MOST["stop_token_ids"])), bad_words_ids=((1, 2),) * (MOST["bad_words"] // 2))
    check_lists(P(**fits)); check_lists(P(bad_words_ids=((1,) * 40_000,)), max_len=128)
    for name, more in (("logit_bias", ((0, 1.0),)), ("stop_ids", (1,)), ("bad_words_ids", ((1,),))):
        with pytest.raises(RequestError, match="send fewer"): check_lists(P(**{name: fits[name] + more}))

# ---- log probabilities, broken rows, half precision, bad ids

def test_logprobs_describe_the_raw_model():
    params = [P(temperature=0.5, seed=3, logprobs=4, logit_bias=((2, 50.0),)), P(temperature=0, logprobs=0), P(temperature=0)]
    bench = Bench(params)
    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    out = bench.step(logits)
    lp = logits.log_softmax(-1)
    assert out.tokens[0] == 2 and out.top_ids.shape == (3, 4)
    torch.testing.assert_close(out.chosen_logprob, lp.gather(1, out.tokens[:, None])[:, 0])
    assert out.rank.tolist() == [(lp[r] > lp[r, out.tokens[r]]).sum().item() + 1 for r in range(3)] and out.rank[1] == 1
    top = lp.topk(4)
    assert torch.equal(out.top_ids, top.indices); torch.testing.assert_close(out.top_logprobs, top.values)
    assert [t.shape for t in token_logprobs(logits, out.tokens, 0)[2:]] == [(3, 0)] * 2
    assert token_logprobs(logits[:, :3], out.tokens.clamp(max=2), 20)[2].shape == (3, 3)
    ties = torch.zeros(1, 6); assert token_logprobs(ties, torch.tensor([4]), 3)[1:3][1].tolist() == [[0, 1, 2]]

def test_nan_and_infinite_rows_are_marked_and_leave_their_neighbours_alone():
    for params in ([P(temperature=0)] * 5, [P(seed=i) for i in range(5)], [P(top_k=4, top_p=0.9, seed=i) for i in range(5)], [P(top_p=0.9, repetition_penalty=1.2)] * 5):
        logits = torch.randn(5, 2000, generator=torch.Generator().manual_seed(0))
        clean = Bench(params, 2000).step(logits).tokens
        broken = logits.clone(); broken[1, 7] = float("nan"); broken[2, 3] = float("inf"); broken[3] = NEG; broken[4, 5] = NEG
        out = Bench(params, 2000).step(broken)
        assert out.finite.tolist() == [True, False, False, False, True]
        assert out.tokens[[0, 4]].tolist() == clean[[0, 4]].tolist() and ((out.tokens >= 0) & (out.tokens < 2000)).all()

def test_rules_that_ban_everything_fall_back_to_the_models_favourite():
    ban_all = tuple((i,) for i in range(64))
    for p in (P(temperature=0, bad_words_ids=ban_all), P(bad_words_ids=ban_all), P(top_k=5, top_p=0.9, bad_words_ids=ban_all)):
        logits = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
        out = Bench([p, P(temperature=0)]).step(logits)
        assert torch.equal(out.tokens, logits.argmax(-1)) and out.finite.all()
    state = Bench([P(), P(temperature=0)]).state
    words = np.zeros((2, 2), np.int32); set_ids(words[0], [9]); set_ids(words[1], [3]); state.masks.put(np.arange(2), words)
    out = state.sample(logits, torch.arange(2), torch.tensor([4, 4]), torch.zeros(2, 8, dtype=torch.int32), Variant(sample=True, k_open=True, masks=True))
    assert out.tokens.tolist() == [9, 3]

@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_near_zero_temperature_and_half_precision(dtype):
    "B10: 11.0625 / 1e-5 overflows fp16; temperatures below 1e-4 and a top_p of 1e-9 are greedy."
    logits = torch.randn(6, 100, generator=torch.Generator().manual_seed(0)).to(dtype); logits[:, 42] = 11.0625
    params = [P(temperature=t, seed=i) for i, t in enumerate((0, 1e-8, 1e-5, 9.9e-5))] + [P(temperature=1e-4, seed=8), P(top_p=1e-9, temperature=2.0)]
    out = Bench(params, 100, dtype=dtype).step(logits)
    assert out.tokens.tolist() == [42] * 6 and out.finite.all()

def test_over_large_and_absent_top_k_in_one_batch_with_a_greedy_row():
    "B09: a huge k is off, greedy rows carry k = 0, 0 and -1 are off."
    params = [P(top_k=9_999_999, seed=1), P(temperature=0), P(top_k=5, seed=2), P(top_k=0, seed=1), P(top_k=-1, seed=1), P(top_k=2**62, seed=1)]
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(0)).expand(6, 300)
    bench = Bench(params, 300, ids=[[1, 2, 3, 4]] * 6)
    t = bench.step(logits).tokens.tolist()
    assert t[0] == t[3] == t[4] == t[5] and t[1] == logits[0].argmax() and t[2] in logits[0].topk(5).indices
    r, n, h, _ = bench.args([0, 1])
    out = bench.state.sample(logits[:2], r, n, h, cover(params[:2]))           # the only k is over-large
    assert out.tokens[1] == t[1]

@pytest.mark.parametrize("params", [P(logit_bias=((64, 1.0),)), P(logit_bias=((-1, 1.0),)), P(stop_ids=(74,)), P(logit_bias=(("abc", 1.0),)), P(bad_words_ids=((1, 64),)),  # type: ignore[arg-type]
    P(logit_bias=((3, 101.0),)), P(logit_bias=((3, float("nan")),)), P(stop_ids=(-1,)), P(stop_ids=(True,))])
def test_ids_outside_the_vocabulary_are_refused_by_name(params):
    "B08; and a refused row changes nothing."
    with pytest.raises(RequestError) as e: check_ids(params, 64)
    assert e.value.param in str(e.value)
    check_ids(P(logit_bias=((63, 100.0),), stop_ids=(63,), bad_words_ids=((63, 0),)), 64)
    if params.logit_bias or params.bad_words_ids:
        bench = Bench([P(temperature=0)])
        before = bench.state.ints.clone(), bench.state.floats.clone()
        with pytest.raises(RequestError): bench.state.init_rows([RowInit(0, 1, params, np.zeros(2, np.int32), 2, 9)])
        assert torch.equal(before[0], bench.state.ints) and torch.equal(before[1], bench.state.floats)

def test_nothing_reads_the_device():
    "Joint 21: every path of sample, update, ends and init_rows under a mode that refuses reads, nonzero and the like."
    params = SETTINGS + [P(repetition_penalty=1.2, top_p=0.9), P(no_repeat_ngram_size=3), P(bad_words_ids=((1,), (2, 3)), min_tokens=4, stop_ids=(1,), logprobs=3)]
    for V, group in [(64, params), (3000, params), *[(3000, [p]) for p in params]]:
        with NoSync():
            bench = Bench(group, V)
            bench.state.init_rows([RowInit(0, 1, group[0], np.arange(6, dtype=np.int32), 4, 99)])
        bench.step(torch.randn(len(group), V, generator=torch.Generator().manual_seed(0)))
        with NoSync(): bench.state.ends(torch.arange(len(group)), torch.arange(len(group)))
    with pytest.raises(AssertionError, match="reads the device"):
        with NoSync(): torch.ones(3).sum().item()
