"Rows that guess, and the state around them, for tests of a step with guesses on a CPU or a GPU."
from typing import Any
import numpy as np
import torch
from llminfer.guess_kernels import KernelLookup
from llminfer.interfaces import RowInit, Variant, variant_of
from llminfer.kernels import FusedStack
from llminfer.request import SamplingParams as P
from llminfer.runner import DecodeState, StepProgram, WideRing
from llminfer.sampling import SamplerState
from llminfer.speculative import Fed

V = 40
KINDS: dict[str, list[dict[str, Any]]] = {"greedy": [{}], "sampled": [dict(temperature=0.7, top_k=8), dict(temperature=1.0, top_k=3, top_p=0.9), {}], "open": [dict(temperature=0.8), dict(temperature=0.9, top_p=0.8, min_p=0.02), {}],
         "penalties": [dict(repetition_penalty=1.3), dict(frequency_penalty=0.4, presence_penalty=0.2), {}], "bias and ends": [dict(logit_bias=((1, 2.0), (3, -2.0))), dict(min_tokens=30), dict(bad_words_ids=((2,),))]}


class Program(FusedStack):
    "As much of a program as the tail asks for."
    def __init__(self) -> None: pass
    feed = StepProgram.feed
    def select(self, variant: Variant) -> Any: return self


class Guessing:
    "R rows of random texts over a few ids, some idle, some ended, some close to their limit; it plays the runner."
    def __init__(self, seed: int, kind: str, D: int, max_len: int = 48, words: int = 3, rows: int = 7, who: Any = KernelLookup, device: str = "cpu", pinned: bool = False):
        rng, R = np.random.default_rng(seed), rows
        pick = lambda *v: v[rng.integers(len(v))]
        self.program, self.rng, self.D = Program(), rng, D
        self.state = st = DecodeState(R, max_len, 4, device)
        self.sampler, self.ring = SamplerState(R + 1, V, torch.device(device)), WideRing(5, R, torch.device(device), pinned=pinned, draft=10)
        self.book = who(R, 10, device, least=None if seed % 2 else 0.0)
        lens = rng.integers(1, max_len - 2, R) if seed % 5 else rng.integers(max_len - 12, max_len - 1, R)
        texts = [rng.integers(0, pick(2, words, words + 1), n).astype(np.int32) for n in lens]
        params = [P(**dict(dict(temperature=0.0, eos_ids=(1,) if rng.random() < 0.2 else (V - 1,), stop_ids=(0,) if rng.random() < 0.2 else (V - 2, 5), seed=int(rng.integers(99)),
            draft_threshold=float(pick(-1, -1, 0.3, 0.55))), **KINDS[kind][i % len(KINDS[kind])])) for i in range(R)]
        limits = [int(min(max_len, n + pick(1, 2, 4, 40))) for n in lens]
        inits = [RowInit(i, i + 3, p, t, min(len(t), 4), limit, draft=int(pick(10, 10, 10, 2, 0))) for i, (p, t, limit) in enumerate(zip(params, texts, limits))]
        self.sampler.init_rows(inits)
        self.book.init_rows(inits)
        self.book.chance[:R] = torch.from_numpy(rng.uniform(0.02, 0.99, (R, 3)).astype(np.float32)).to(device)
        for r, t in enumerate(texts): st.history[r, :len(t)] = torch.from_numpy(t).to(device)
        dev = lambda a: torch.from_numpy(np.asarray(a, np.int64)).to(device)
        st.len[:R], st.limit[:R], st.token[:R] = dev(lens - 1), dev(limits), dev([t[-1] for t in texts])
        st.quota[:R], st.status[:R], st.generation[:R] = dev(rng.choice([0, 1, 5, 5, 5], R)), dev(rng.choice([1, 1, 1, 1, 1, 2, 0], R)), dev(np.arange(R) + 3)
        st.quota[0], st.status[0] = 5, 1
        st.step.fill_(65533 + seed)
        self.rows = dev([*rng.permutation(R), R, R])
        self.before_len, self.variant = st.len.clone(), Variant(draft=D)
        for p in params: self.variant = self.variant.join(variant_of(p))

    def logits(self, fed: Fed) -> torch.Tensor: # [B S, V]
        "What a model says that often agrees with a guess, and now and then is no number; places that are not live hold NaN."
        ids, (B, S) = fed.ids.cpu().numpy(), fed.ids.shape
        x = self.rng.standard_normal((B, S, V)).astype(np.float32)
        follow = np.concatenate((ids[:, 1:], ids[:, :1]), 1)
        right = self.rng.random((B, S)) < 0.8
        np.put_along_axis(x, np.where(right, follow, self.rng.integers(0, V, (B, S)))[..., None], 9.0, 2)
        x[self.rng.random((B, S)) < 0.04] = np.nan
        x[self.rng.random((B, S)) < 0.02, 7] = np.inf
        x[~fed.live.cpu().numpy()] = np.nan
        return torch.from_numpy(x.reshape(B * S, V)).to(fed.ids.device)


def same_fed(x: Fed, y: Fed) -> None:
    act = x.live[:, 0]
    assert torch.equal(x.live, y.live) and torch.equal(x.size[act], y.size[act])
    for a, b in ((x.ids, y.ids), (x.owner, y.owner), (x.places, y.places), (x.total, y.total)): assert torch.equal(a, b) and b.is_contiguous()


def same_world(a: Guessing, b: Guessing) -> None:
    "All that a step may change, of rows that are somebody's."
    R, wides = a.state.max_rows, []
    for w in (a, b):
        assert w.ring.wide is not None
        wide = w.ring.wide.clone()
        wide[(wide >> 44 & 1) == 0] &= ~((1 << 24) - 1)       # without a token the token's bits mean nothing
        wides.append(wide)
    pairs = [(a.state.ints[:, :R], b.state.ints[:, :R]), (a.state.history[:R], b.state.history[:R]), (a.state.step, b.state.step), (wides[0], wides[1])]
    if a.sampler.counts.data is not None and b.sampler.counts.data is not None: pairs.append((a.sampler.counts.data[:R], b.sampler.counts.data[:R]))
    for x, y in pairs: assert torch.equal(x, y)
    torch.testing.assert_close(a.book.chance[:R], b.book.chance[:R], rtol=1e-5, atol=0)
