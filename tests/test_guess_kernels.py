"""A step with guesses in two kernels, under Triton's interpreter, against the torch step of notebook 16: the same guesses, tokens, rows, words and chances.

Triton decides when it is imported whether it interprets, so the tests run in a process of their own; the one test seen from outside starts it."""
import os
from support.own_process import run_alone

if os.environ.get("TRITON_INTERPRET") != "1":
    def test_guesses_under_the_interpreter(): run_alone(__file__)
else:
    import random
    from dataclasses import replace
    import pytest
    import torch
    from support import bounds
    from support.guess_scenes import KINDS, Guessing, V, same_fed, same_world
    from llminfer.core import CoreConfig, generate, make_core
    from llminfer.cuda_graphs import GraphRunner
    from llminfer.draft import DeviceDrafts, Source
    from llminfer.guess_kernels import FusedTail, KernelDrafts, KernelLookup
    from llminfer.interfaces import RowStatus
    from llminfer.layers import LayerProgram
    from llminfer.loading import load_model, make_tiny, open_checkpoint
    from llminfer.request import SamplingParams
    from llminfer.speculative import DeviceLookup

    bounds.install()

    @pytest.mark.parametrize("nb", [0, 5])
    def test_what_is_fed_is_what_torch_feeds(nb):
        "Sizes, guesses, places, histories: random texts over two to four ids, of 1 to 40; idle and ended rows, padding, thresholds, limits, windows."
        found, tried = set(), set()
        for seed in range(60):
            D = 1 + seed % 9
            a, b = (Guessing(seed, "greedy", D) for _ in range(2))
            x, y = DeviceLookup.lay(a.book, a, a.program, a.rows, nb, a.variant), KernelLookup.lay(b.book, b, b.program, b.rows, nb, b.variant)
            same_fed(x, y)
            same_world(a, b)
            found |= set(y.size.tolist())
            tried |= set(y.live[:, 1:].sum(1).tolist())
        assert found == {0, 2, 3, 4} and {0, 1, 2, 3, 4, 8} <= tried

    def test_texts_longer_than_a_block_and_the_latest_of_many_matches():
        n = 0
        for seed in range(8):
            a, b = (Guessing(seed, "greedy", 8, max_len=5000, words=5 + 40 * (seed % 2), rows=3) for _ in range(2))
            for w in (a, b): w.state.quota[:3], w.state.status[:3], w.state.limit[:3], w.book.asked[:], w.book.most[:3] = 5, 1, 5000, 0.0, 10
            x, y = DeviceLookup.lay(a.book, a, a.program, a.rows, 0, a.variant), KernelLookup.lay(b.book, b, b.program, b.rows, 0, b.variant)
            same_fed(x, y)
            n += int(y.live[:, 1:].sum())
        assert n > 50

    @pytest.mark.parametrize("kind", KINDS)
    def test_what_counts_is_what_counts_in_torch(kind):
        "Tokens, ends of every kind, NaN, counts, words and chances; guesses that are right, wrong, none, and the model's own behind them."
        ends, accepted = set(), 0
        for seed in range(12 if kind == "greedy" else 6):
            D = 1 + (3 * seed + 7) % 9
            a, b = (Guessing(seed, kind, D) for _ in range(2))
            for w, who in ((a, DeviceLookup), (b, KernelLookup)):
                fed = who.lay(w.book, w, w.program, w.rows, 0, w.variant)
                who.close(w.book, w, w.rows, fed, w.logits(fed), w.variant)
            same_world(a, b)
            ends |= set(b.state.status[:-1].tolist())
            accepted += int((b.state.len - b.before_len)[:-1].clamp_min(1).sub(1).sum())
        assert accepted > 8, accepted
        if kind == "greedy": assert ends == set(RowStatus)

    @pytest.mark.parametrize("kind", ["greedy", "penalties"])
    def test_step_after_step(kind):
        "A model that knows the last id only; what a step leaves is what the next one reads."
        table = torch.randn(V, V, generator=torch.Generator().manual_seed(0)) * 4
        a, b = (Guessing(3, kind, 8, max_len=200) for _ in range(2))
        for w in (a, b): w.state.quota[:7], w.state.limit[:7], w.book.asked[:], w.book.most[:7] = 100, 200, 0.0, 8
        for _ in range(10):
            for w, who in ((a, DeviceLookup), (b, KernelLookup)):
                fed = who.lay(w.book, w, w.program, w.rows, 0, w.variant)
                who.close(w.book, w, w.rows, fed, table[fed.ids.view(-1)], w.variant)
            same_world(a, b)
        assert (a.state.len - a.before_len)[:7].max() > 20

    def test_a_draft_is_told_what_a_lookup_learns():
        told = []
        class Told(FusedTail):
            def learn(self, *args): told.append(args)
        class Wanted(DeviceLookup):
            def learn(self, *args): told.append(args)
        for seed in range(4):
            for who in (Wanted, Told):
                w = Guessing(seed, "greedy", 5, who=who)
                fed = DeviceLookup.lay(w.book, w, w.program, w.rows, 0, w.variant)
                w.book.close(w, w.rows, fed, w.logits(fed), w.variant)
            for x, y in zip(*told[-2:]): assert torch.equal(x, y)

    def test_what_kernels_do_not_cover_is_torch(monkeypatch):
        "Log probabilities, n-grams, long bad words: `draw_places` is never asked."
        monkeypatch.setattr("llminfer.guess_kernels.draw_places", None)
        for v in (dict(logprobs=1), dict(ngram=2), dict(masks=True)):
            a, b = (Guessing(1, "greedy", 4) for _ in range(2))
            for w, who in ((a, DeviceLookup), (b, KernelLookup)):
                fed = who.lay(w.book, w, w.program, w.rows, 0, variant := replace(w.variant, **v))
                who.close(w.book, w, w.rows, fed, w.logits(fed), variant)
            same_world(a, b)

    @pytest.fixture(scope="module")
    def world(tmp_path_factory):
        model = load_model(open_checkpoint(str(make_tiny(tmp_path_factory.mktemp("m"), "llama", 0, head_dim=64))), torch.float32, "cpu")
        rng = random.Random(2)
        prompts = [[rng.randrange(60, 64) for _ in range(n)] for n in (9, 3, 14)]
        few = ((60, 22.0), (61, 20.0), (62, 21.0))
        params = [SamplingParams(temperature=t, seed=i, max_tokens=9, frequency_penalty=f, logit_bias=few, logprobs=p) for i, (t, f, p) in enumerate(((0, 0.2, -1), (0.8, 0.3, -1), (0, 0, -1)))]
        return model, CoreConfig(n_blocks=80, block_size=4, max_num_seqs=2, max_model_len=48, window_steps=3, max_in_flight=2, free_guesses=False), prompts, params

    @pytest.mark.parametrize("who, source", [(KernelLookup, None), (KernelDrafts, "same")], ids=["lookup", "drafts"])
    def test_whole_texts_with_and_without(world, who, source):
        model, cfg, prompts, params = world
        want = generate(make_core(model, cfg), prompts, params)
        extra = dict(source=Source(model)) if source else {}
        out, counters = [], []
        for kind in (DeviceDrafts if source else DeviceLookup, who):
            core = make_core(model, replace(cfg, draft=4), runner=GraphRunner, program=LayerProgram, speculate=lambda R, D, device, kind=kind: kind(R, D, device, least=0.0, **extra))
            out.append(generate(core, prompts, params))
            assert not core.runner.failed
            counters.append({k: core.trace.counters[k] for k in ("draft_tokens", "accepted_tokens")})
        assert out[0] == out[1] == want and counters[0] == counters[1] and counters[0]["accepted_tokens"] > 5
