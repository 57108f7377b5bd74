"""The fused sampling tail under Triton's interpreter against `SamplerState.sample`, `advance` and `Ring.write`: the same tokens, states and words.

Triton decides when it is imported whether it interprets, so the tests run in a process of their own; the one test seen from outside starts it."""
import os
from support.own_process import run_alone

if os.environ.get("TRITON_INTERPRET") != "1":
    def test_the_tail_under_the_interpreter(): run_alone(__file__)
else:
    import numpy as np
    import pytest
    import torch
    import triton
    import triton.language as tl
    from llminfer.draw import TailShape, cipher, finish_fused, gumbel_of, noise_at, tail_shape, torch_parts
    from llminfer.interfaces import RowInit, RowStatus, variant_of
    from llminfer.request import SamplingParams as P
    from llminfer.runner import DecodeState, Ring, finish_step
    from llminfer.sampling import Noise, SamplerState, gumbel, philox
    from support.draw_scenes import KINDS, Rows, clear

    NAN, INF = float("nan"), float("inf")
    SMALL = TailShape(128, 16)

    def logits_of(R, V, seed, scale=1.0, coarse=0.0, dtype=torch.float32):
        x = torch.randn(R, V, generator=torch.Generator().manual_seed(seed)) * scale
        return ((x / coarse).round() * coarse if coarse else x).to(dtype)

    def both(params, x, seed=0, shape=None, rows=None, prepare=lambda w: None, n_prompt=5):
        "Two equal worlds, one step each: by torch and fused."
        a, b = (Rows(params, x.shape[1], seed, n_prompt=n_prompt) for _ in range(2))
        for w in (a, b): prepare(w)
        rows, n, act = a.args(rows)
        sure = clear(a, x, rows, n) & act
        finish_step(a.st, a.sampler, a.ring, x, rows, n, act, a.variant)
        finish_fused(b.st, b.sampler, b.ring, x, rows, n, act, b.variant, shape)
        return a, b, sure, act

    def same(a, b): return [torch.equal(x, y) for x, y in zip(a.fields(), b.fields())]

    @triton.jit
    def noise_kernel(words, noise, ids, seed, child, position, N: tl.constexpr):
        i = tl.arange(0, N)
        n = tl.load(ids + i)
        w0, w1, w2, w3 = cipher(n >> 2, tl.load(seed), tl.load(child), tl.load(position))
        tl.store(words + i, w0)
        tl.store(words + N + i, w1)
        tl.store(words + 2 * N + i, w2)
        tl.store(words + 3 * N + i, w3)
        tl.store(noise + i, noise_at(n, tl.load(seed), tl.load(child), tl.load(position)))

    def test_noise_is_the_sampler_s():
        "Random bits to the bit; the two logarithms to a few units of the last place, at both ends of their range too."
        ids, low, high = torch.randint(0, 2**24, (256,), generator=torch.Generator().manual_seed(0)), 0xDEADBEEF, 0xF0000007
        words, noise, one = torch.zeros(4, 256, dtype=torch.int64), torch.zeros(256), lambda v: torch.tensor([v])
        noise_kernel[(1,)](words, noise, ids, one((high - 2**32 << 32) | low), one(3), one(77), N=256)
        assert torch.equal(words, philox((one(77), one(3), ids >> 2, 0), (one(low), one(high))).view(4, 256))
        assert (noise - Noise((one(low), one(high)), one(3), one(77)).at(ids[None])[0]).abs().max() < 2e-6
        bits = torch.cat([torch.arange(64), 2**32 - 1 - torch.arange(64), torch.randint(0, 2**32, (896,), generator=torch.Generator().manual_seed(1))])
        got = torch.zeros(1024)
        gumbel_kernel[(1,)](bits, got, N=1024)
        assert (got - gumbel(bits)).abs().max() < 4e-6 and got.isfinite().all()

    @triton.jit
    def gumbel_kernel(bits, out, N: tl.constexpr):
        i = tl.arange(0, N)
        tl.store(out + i, gumbel_of(tl.load(bits + i).to(tl.uint32)))

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_step_is_the_torch_step(kind):
        "Tokens, rows, histories, counts, words, log probabilities; flat and peaked logits, ties, fp16, a last chunk that is short, two ways to cut."
        unsure, n = 0, 0
        for seed in range(6):
            x = logits_of(4, 300, seed, scale=(1.0, 4.0)[seed % 2], coarse=(0.0, 0.5, 0.0)[seed % 3], dtype=torch.float16 if seed == 4 else torch.float32)
            a, b, sure, _ = both(KINDS[kind], x, seed, SMALL if seed % 2 else None)
            assert all(same(a, b)) or not sure.all(), (seed, a.st.token, b.st.token)
            assert (a.st.token == b.st.token)[:4][sure].all()
            unsure, n = unsure + int((~sure).sum()), n + 4
        assert unsure <= 1

    def test_hundreds_of_random_rows():
        rng, unsure = np.random.default_rng(0), 0
        pick = lambda *v: v[rng.integers(len(v))]
        for seed in range(9):
            params = [P(temperature=float(pick(0.0, 0.5, 1.0, 2.0)), top_k=int(pick(0, 0, 1, 7, 50, 200)), top_p=float(pick(1.0, 0.2, 0.8, 0.95)), min_p=float(pick(0.0, 0.0, 0.1)), seed=int(rng.integers(2**62)),
                        child=int(rng.integers(4)), presence_penalty=float(pick(0.0, 0.7)), repetition_penalty=float(pick(1.0, 1.2)), frequency_penalty=float(pick(0.0, -0.3)),
                        logit_bias=((int(rng.integers(700)), 3.0),) if rng.random() < 0.3 else (), min_tokens=int(pick(0, 50)), eos_ids=(1, 2)) for _ in range(24)]
            a, b, sure, _ = both(params, logits_of(24, 700, seed, scale=float(pick(0.3, 2.0, 6.0)), coarse=float(pick(0.0, 0.0, 0.25))), seed, TailShape(256, 32) if seed % 3 else None)
            assert (a.st.token == b.st.token)[:24][sure].all(), seed
            assert all(same(a, b)) or not sure.all()
            unsure += int((~sure).sum())
        assert unsure <= 3

    @pytest.mark.parametrize("top_p", [1.0, 0.8])
    def test_every_top_k_and_any_cut_of_the_vocabulary(top_p):
        "top_k from 1 to beyond the vocabulary; the token does not depend on chunks and groups, to the bit."
        V = 130
        params = [P(temperature=1.5, seed=k, top_k=k, top_p=top_p) for k in (*range(1, 9), *range(16, V, 13), V - 1, V, V + 4)]
        x, tokens = logits_of(len(params), V, 1, coarse=0.25), []
        for shape in (None, TailShape(64, 16), TailShape(32, 2)):
            a, b, sure, _ = both(params, x, shape=shape)
            assert sure.all() and all(same(a, b))
            tokens.append(b.st.token)
        assert all(torch.equal(t, tokens[0]) for t in tokens)

    def test_ties_and_few_words():
        "Equal logits, two values, fewer words than top_k, one word: the order is by value, then by id."
        params = [P(temperature=1, seed=s, top_k=k, top_p=p) for s, (k, p) in enumerate([(1, 1), (5, 1), (20, 0.5), (40, 0.03), (20, 0.9), (40, 0.5)])]
        for seed in range(5):
            x = torch.zeros(6, 200)
            x[1:3, ::3] = 1.0
            x[3:, 7:] = -INF
            x[4, :6] = -INF
            x[5] = torch.where(torch.arange(200) % 2 == 0, 0.0, -0.0)      # both zeros are one value
            a, b, sure, _ = both(params, x, seed, SMALL)
            assert all(same(a, b))
            assert b.st.token[0] == 0 and b.st.token[4] == 6 and b.st.token[1] in range(0, 15, 3) and b.st.token[3] < 2

    def test_a_nucleus_that_refuses_many_winners():
        "Flat logits and a tiny top-p: the race is lost many times before a word of the nucleus wins it."
        params = [P(temperature=1, seed=s, top_p=p, min_p=m) for s, (p, m) in enumerate([(0.002, 0), (0.01, 0), (0.03, 0.5), (0.2, 0.9)])] * 2
        for seed in range(2):
            a, b, sure, _ = both(params, logits_of(8, 500, seed, 0.3), seed, SMALL)
            assert sure.all() and all(same(a, b))

    def test_numbers_that_are_none():
        "NaN, +inf, nothing but -inf; all words banned by rules; sampled, top-k and greedy rows."
        kinds = [P(temperature=0, eos_ids=(3,)), P(temperature=1, seed=1, top_k=5, eos_ids=(3,)), P(temperature=1, seed=2, top_p=0.5, eos_ids=(3,)), P(temperature=1, seed=3, min_tokens=60, eos_ids=(3,))]
        for value in (NAN, INF, -INF):
            x = logits_of(4, 300, 0)
            x[:, 200] = value
            if value == -INF: x[:] = value
            a, b, _, act = both(kinds, x, shape=SMALL)
            assert (b.st.status[:4] == RowStatus.NAN).all() and all(same(a, b)[:3])
            assert torch.equal(a.ring.words >> 24, b.ring.words >> 24)          # without a token the token's bits mean nothing
        x = torch.full((4, 300), -INF)
        x[:, 3] = 2.0                                                            # the last row may not end, and has no other word: the model's choice stands
        a, b, _, _ = both(kinds, x, shape=SMALL)
        assert all(same(a, b)) and (b.st.status[:4] == RowStatus.EOS).all()

    def test_dead_and_padding_places_write_nothing():
        params = KINDS["mixed"] + KINDS["rules"]
        rows, x = torch.tensor([5, 0, 1, 2, 6, 8, 8, 8]), logits_of(8, 300, 3)
        x[4:] = NAN
        def prepare(w): w.st.quota[6], w.st.status[1], w.st.status[8] = 0, 3, 0
        a, b, sure, act = both(params, x, rows=rows, prepare=prepare, shape=SMALL)
        before = Rows(params, 300)
        prepare(before)
        assert act.tolist() == [True, True, False, True] + [False] * 4 and all(same(a, b)[:3]) and same(a, b)[4]
        for r in (1, 3, 4, 6, 7, 8):
            assert torch.equal(b.st.ints[:, r], before.st.ints[:, r]) and torch.equal(b.st.history[r], before.st.history[r])
            assert torch.equal(b.sampler.counts.data[r], before.sampler.counts.data[r])

    def state(R=8, V=300, seed=0, penalties=False):
        st, sampler = DecodeState(R, 32, 4), SamplerState(R + 1, V, "cpu")
        p = [P(temperature=0, eos_ids=(5, 9), stop_ids=(5, 9, 17, *([200 + r] if r % 2 else [])), presence_penalty=penalties * 0.5) for r in range(R)]
        sampler.init_rows([RowInit(r, r + 3, p[r], np.arange(3, dtype=np.int32), 3, 30) for r in range(R)])
        g = torch.Generator().manual_seed(seed)
        st.token[:R], st.len[:R], st.limit[:R] = torch.randint(0, V, (3, R), generator=g)[0], torch.tensor([3, 9, 28, 28, 5, 6, 31, 7]), torch.tensor([30, 30, 30, 31, 30, 30, 32, 30])
        st.quota[:R], st.status[:R], st.generation[:R] = torch.tensor([2, 1, 3, 1, 0, 2, 1, 4]), torch.tensor([1, 1, 1, 1, 1, 3, 1, 1]), torch.arange(R) + 3
        st.step.fill_(65534 + seed)
        return st, sampler, Ring(5, R, torch.device("cpu"))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_ends_of_greedy_rows(dtype):
        "EOS, STOP, LENGTH, NaN, +inf, all -inf, quota 0, an ended row, the padding row twice, ties, a tag that wraps; penalty counts go on."
        V = 2500                                                    # more than one chunk, the last one short
        for seed, penalties in ((0, False), (1, True)):
            logits = torch.randn(10, V, generator=torch.Generator().manual_seed(seed)).to(dtype)
            for place, token in ((0, 9), (1, 17), (2, 2499), (3, 201), (7, 40)): logits[place, token] = 50
            logits[7, 2300] = 50                                    # a tie over two chunks: the first id wins
            logits[5] = logits[6] = NAN                              # 5 has ended before
            if seed: logits[0, 7], logits[1], logits[2, 2100] = NAN, -INF, INF
            rows = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 8])
            worlds = [state(V=V, seed=seed, penalties=penalties) for _ in range(2)]
            for (st, sampler, ring), finish in zip(worlds, (finish_step, finish_fused)):
                finish(st, sampler, ring, logits.clone(), rows, st.len[rows] + 1, st.live(rows), variant_of(P(temperature=0)))
            (st, sampler, ring), (st2, sampler2, ring2) = worlds
            for w in (ring.words, ring2.words): w[(w >> 44 & 1) == 0] &= ~((1 << 24) - 1)   # without a token the token's bits mean nothing
            pairs = [(st.ints, st2.ints), (st.history, st2.history), (st.step, st2.step), (ring.words, ring2.words)] + ([(sampler.counts.data, sampler2.counts.data)] if penalties else [])
            for x, y in pairs: assert torch.equal(x, y)
            seen = set(st2.status[:8].tolist())
            assert RowStatus.NAN in seen and (seed or {RowStatus.EOS, RowStatus.STOP, RowStatus.LENGTH} <= seen)

    def test_what_stays_in_torch_is_named():
        assert torch_parts(variant_of(P(temperature=1, top_k=5, presence_penalty=1, logit_bias=((1, 1.0),), min_tokens=3))) == ()
        assert torch_parts(variant_of(P(logprobs=0, no_repeat_ngram_size=2, bad_words_ids=((1, 2),)))) == ("ngram", "bad_words", "logprobs")
        w = Rows(KINDS["bad words of one id"], 300)
        assert torch_parts(w.variant, w.sampler) == ()
        for V in (40, 300, 2048, 32768, 49152, 151936, 262144, 2**24):
            s = tail_shape(V)
            assert s.chunk % s.group == 0 and -(-V // s.chunk) * (s.chunk // s.group) <= 16384 and s.chunk // s.group >= 4
