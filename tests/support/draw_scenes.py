"Rows with sampling settings and the state around them, for tests of the sampling tail on a CPU or a GPU."
import numpy as np
import torch
from llminfer.interfaces import RowInit, Variant, variant_of
from llminfer.request import SamplingParams
from llminfer.runner import DecodeState, Ring
from llminfer.sampling import FloatCol, IntCol, Noise, SamplerState

NOISE_ERROR = 4e-6    # scores closer than this are a tie: two ways to round two logarithms
CUT_ERROR = 4e-6      # a top-p cut may fall on either side of a word when the mass before it is this close to p


KINDS = {
    "temperature": [SamplingParams(temperature=t, seed=s) for s, t in enumerate((0.3, 0.8, 1.0, 1.7))],
    "top-k": [SamplingParams(temperature=0.8, seed=s, top_k=k) for s, k in enumerate((1, 2, 17, 64))],
    "top-k top-p": [SamplingParams(temperature=1.3, seed=s, top_k=k, top_p=p) for s, (k, p) in enumerate(((1, 0.1), (5, 0.5), (40, 0.95), (64, 0.3)))],
    "top-p": [SamplingParams(temperature=1.1, seed=s, top_p=p) for s, p in enumerate((0.01, 0.3, 0.9, 0.99))],
    "min-p": [SamplingParams(temperature=1.2, seed=s, min_p=m, top_p=p) for s, (m, p) in enumerate(((0.01, 1), (0.3, 1), (0.05, 0.9), (1.0, 1)))],
    "mixed": [SamplingParams(temperature=0), SamplingParams(temperature=0.7, top_k=9, top_p=0.8, seed=3, min_p=0.02), SamplingParams(seed=4, temperature=1, top_p=0.7), SamplingParams(seed=-5, temperature=1, child=3)],
    "rules": [SamplingParams(temperature=0, repetition_penalty=1.3), SamplingParams(temperature=0.7, top_k=9, seed=3, presence_penalty=0.5, logit_bias=((3, 5.0), (70, -2.0), (299, 3.0))),
              SamplingParams(seed=4, temperature=1, top_p=0.7, frequency_penalty=0.6, min_tokens=60, eos_ids=(1, 2, 3), stop_ids=(4, 298)), SamplingParams(seed=5, temperature=1, repetition_penalty=0.7)],
    "in torch": [SamplingParams(temperature=0, repetition_penalty=1.3, logprobs=2), SamplingParams(temperature=0.7, top_k=9, seed=3, presence_penalty=0.5, logit_bias=((3, 5.0),), no_repeat_ngram_size=2),
                 SamplingParams(seed=4, temperature=1, top_p=0.7, min_tokens=60, eos_ids=(1, 2, 3)), SamplingParams(seed=5, temperature=1, bad_words_ids=((5,), (7, 8)))],
    "bad words of one id": [SamplingParams(temperature=0, bad_words_ids=((7,), (8,))), SamplingParams(seed=5, temperature=1, bad_words_ids=((5,), (299,)))] * 2,
}


class Rows:
    "R rows with their own settings, all live, each with a history of random ids."
    def __init__(self, params: list[SamplingParams], V: int, seed: int = 0, device: str = "cpu", n_prompt: int = 5, max_len: int = 64, pinned: bool = False):
        R, rng = len(params), np.random.default_rng(seed)
        self.params, self.V, self.R, self.device = params, V, R, device
        self.st, self.sampler = DecodeState(R, max_len, 4, device), SamplerState(R + 1, V, device)
        self.ring = Ring(5, R, torch.device(device), pinned=pinned)
        lens = rng.integers(n_prompt, max_len - 3, R)
        words = [rng.integers(0, V if r % 2 else min(V, 40), n).astype(np.int32) for r, n in enumerate(lens)]
        self.sampler.init_rows([RowInit(r, r + 3, p, words[r], n_prompt, max_len) for r, p in enumerate(params)])
        for r, w in enumerate(words): self.st.history[r, :len(w)] = torch.from_numpy(w).to(device)
        st = self.st
        st.len[:R], st.limit[:R], st.quota[:R], st.status[:R] = torch.from_numpy(lens - 1).to(device), max_len, 100, 1
        st.generation[:R], st.token[:R] = torch.arange(R, device=device) + 3, 7
        self.variant = Variant()
        for p in params: self.variant = self.variant.join(variant_of(p))

    def args(self, rows=None):
        rows = torch.arange(self.R, device=self.device) if rows is None else rows
        return rows, self.st.len[rows] + 1, self.st.live(rows)

    def fields(self):
        "All that a step may change."
        out = [self.st.ints, self.st.history, self.st.step, self.ring.words]
        return out + ([self.sampler.counts.data] if self.sampler.counts.data is not None else []) + (self.ring.side or [])


def clear(w: Rows, logits: torch.Tensor, rows: torch.Tensor, n_total: torch.Tensor) -> torch.Tensor: # [B] bool
    "Rows whose token does not hang on how a float is rounded: the winner is ahead, and on the safe side of the top-p cut, in float64 from the adjusted logits."
    x = logits.to(torch.float32, copy=True)
    w.sampler.adjust(x, rows, n_total, w.st.history, w.variant)
    out = []
    for b, (r, t) in enumerate(zip(rows.tolist(), n_total.tolist())):
        ints, floats = w.sampler.ints[r].tolist(), w.sampler.floats[r].cpu()
        values, ids = torch.sort(x[b].cpu(), descending=True, stable=True)
        if ints[IntCol.GREEDY] or not torch.isfinite(values[0]):
            out.append(True)
            continue
        y = ((values - values[0]) / floats[FloatCol.TEMPERATURE]).double()      # exact: fp32 division is the same everywhere
        top_p = float(floats[FloatCol.TOP_P])
        keep = (torch.arange(len(y)) < ints[IntCol.TOP_K]) & values.isfinite()
        e = torch.where(keep, y.exp(), 0.0)
        share = (e.cumsum(0) - e) / e.sum()
        keep &= (share < top_p + CUT_ERROR) & (y >= float(floats[FloatCol.LOG_MIN_P]))
        i = [torch.tensor([ints[c]]) for c in (IntCol.SEED_LOW, IntCol.SEED_HIGH, IntCol.CHILD)]
        noise = Noise((i[0], i[1]), i[2], torch.tensor([t])).all(len(y))[0, ids].double()
        best, at = torch.where(keep, y + noise, -torch.inf).topk(2)
        out.append(bool(best[0] - best[1] > NOISE_ERROR) and bool(share[at[0]] < top_p - CUT_ERROR))
    return torch.tensor(out)
