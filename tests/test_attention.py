"Paged attention against a dense oracle: random tables, blocks, cuts and windows; poisoned memory; B21, B24, B25 of cases.md."
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from llminfer.attention import KVPool, PagedAttention, _group_chunks

NAN = float("nan")


def dense(q, k, v, window=None):
    "Whole-sequence attention in fp64: q [L, H, E], k and v [L, G, E]."
    q, k, v = (x.double() for x in (q, k, v))
    L, ratio = len(q), q.shape[1] // k.shape[1]
    i, j = torch.arange(L, device=q.device)[:, None], torch.arange(L, device=q.device)[None]
    hidden = (j > i) | (j <= i - window) if window else j > i
    s = torch.einsum("ihe,jhe->hij", q, k.repeat_interleave(ratio, 1)) * q.shape[-1] ** -0.5
    return torch.einsum("hij,jhe->ihe", s.masked_fill(hidden, -torch.inf).softmax(-1), v.repeat_interleave(ratio, 1))


class NoReads(TorchDispatchMode):
    "Raises on everything that makes the host wait for a value."
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if any(w in name for w in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "aten::equal", "unique")): raise AssertionError(name)
        if name.startswith("aten::index.") and any(i is not None and i.dtype == torch.bool for i in args[1]): raise AssertionError("boolean index")
        return func(*args, **(kwargs or {}))


def poison(kv, k=NAN, v=NAN):
    for x in kv.k: x.fill_(k)
    for x in kv.v: x.fill_(v)


class Walk:
    "Random packed prefills and decode steps over a pool full of NaN, two layers (all of the past; a window), checked token by token."
    def __init__(self, seed, block, window, ratio, dtype=torch.float64, device="cpu", longest=40, head_dim=8):
        self.rng, self.block, self.windows = np.random.default_rng(seed), block, [None, window]
        self.gen, self.device = torch.Generator().manual_seed(seed), device
        self.n = int(self.rng.integers(1, 7))
        self.total = self.rng.integers(1, longest + 1, self.n)
        self.prompt = np.array([self.rng.integers(1, t + 1) for t in self.total])
        self.done = np.zeros(self.n, int)
        need = [-(-int(t) // block) for t in self.total]
        ids = self.rng.permutation(sum(need) + 3) + 1
        cuts = np.cumsum([0, *need])
        self.tables = [ids[a:b].tolist() for a, b in zip(cuts, cuts[1:])]
        G = 2
        self.kv = KVPool(2, len(ids) + 1, block, G, head_dim, dtype, device)
        poison(self.kv)
        self.att = PagedAttention(self.kv, G * ratio, windows=self.windows)
        def new(heads): return [[torch.randn(int(t), heads, head_dim, generator=self.gen).to(device, dtype) for t in self.total] for _ in range(2)]
        self.q, self.k, self.v = new(G * ratio), new(G), new(G)
        self.want = [[dense(*x, w) for x in zip(self.q[i], self.k[i], self.v[i])] for i, w in enumerate(self.windows)]
        self.error = 0.0

    def compare(self, layer, row, a, got):
        d = (got.double() - self.want[layer][row][a:a + len(got)]).abs().max().item()
        self.error = max(self.error, d if d == d else float("inf"))

    def prefill(self, chunk):
        rows = [r for r in self.rng.permutation(self.n) if self.done[r] < self.prompt[r] and self.rng.random() < 0.8]
        if not rows: return
        starts = [int(self.done[r]) for r in rows]
        sizes = [min(int(self.rng.integers(1, chunk + 1)), int(self.prompt[r]) - s) for r, s in zip(rows, starts)]
        width = max(-(-(s + m) // self.block) for s, m in zip(starts, sizes))
        tables = [self.tables[r][:width] for r in rows]
        meta = self.att.prefill_meta(tables, starts, sizes)
        for i in range(2):
            packed = [torch.cat([x[i][r][s:s + m] for r, s, m in zip(rows, starts, sizes)]) for x in (self.q, self.k, self.v)]
            with NoReads(): out = self.att.prefill(i, *packed, meta)
            for r, s, o in zip(rows, starts, out.split(sizes)): self.compare(i, r, s, o)
        self.done[rows] += sizes

    def decode(self):
        rows = self.rng.permutation(self.n)
        live = [bool(self.prompt[r] <= self.done[r] < self.total[r] and self.rng.random() < 0.8) for r in rows]
        width = max([int(self.done[r]) // self.block + 1 for r, a in zip(rows, live) if a], default=1)
        tables = torch.tensor([(self.tables[r] + [0] * width)[:width] for r in rows], dtype=torch.int32, device=self.device)
        p = torch.tensor([int(self.done[r]) if a else 10**6 for r, a in zip(rows, live)], device=self.device)
        alive = torch.tensor(live, device=self.device)
        with NoReads(): meta = self.att.decode_meta(tables, p, alive)
        for i in range(2):
            step = [torch.stack([x[i][r][self.done[r]] if a else torch.full_like(x[i][r][0], dead) for r, a in zip(rows, live)])
                    for x, dead in ((self.q, NAN), (self.k, 0.5), (self.v, 0.5))]   # a finite k or v that is written shows
            with NoReads(): out = self.att.decode(i, *step, meta)
            for r, a, o in zip(rows, live, out):
                if a: self.compare(i, r, self.done[r], o[None])
                else: assert torch.count_nonzero(o).item() == 0
        self.done[rows[np.array(live)]] += 1

    def run(self, chunk):
        while (self.done < self.total).any():
            self.prefill(chunk)
            self.decode()
        written = sorted(t[p // self.block] * self.block + p % self.block for t, n in zip(self.tables, self.total) for p in range(n))
        for x in (*self.kv.k, *self.kv.v):
            finite = x.view(self.kv.n_slots, -1).isfinite()
            assert torch.equal(finite.any(1), finite.all(1)) and finite.any(1).nonzero()[:, 0].tolist() == written
        assert torch.count_nonzero(self.kv.data[:, self.kv.zero_slot]).item() == 0
        return self.error


CASES = [("cpu", torch.float64, 1e-12), ("cpu", torch.float32, 1e-5)]
if torch.cuda.is_available(): CASES += [("cuda", torch.float32, 1e-5), ("cuda", torch.float16, 5e-3), ("cuda", torch.bfloat16, 4e-2)]


@pytest.mark.parametrize("device,dtype,eps", CASES)
def test_any_tables_blocks_cuts_and_windows_equal_dense(device, dtype, eps):
    @settings(max_examples=25, deadline=None)
    @given(st.integers(0, 2**32 - 1), st.sampled_from([1, 3, 16]), st.sampled_from([None, 1, 5, 8, 64]), st.sampled_from([1, 2, 3]), st.sampled_from([1, 5, 40]))
    def check(seed, block, window, ratio, chunk):
        assert Walk(seed, block, window, ratio, dtype, device).run(chunk) <= eps
    check()


@pytest.mark.parametrize("window", [None, 50])
def test_long_chunks_that_a_cpu_slices_and_passes_that_it_splits(window, monkeypatch):
    monkeypatch.setattr("llminfer.attention._PASS_BYTES", 4096)   # a row or two at a time
    for seed in range(2): assert Walk(seed, 16, window, 3, longest=300).run(290) <= 1e-12


def test_groups_are_a_partition_and_are_few():
    rng = np.random.default_rng(0)
    starts, lengths = rng.choice([0, 96, 200], 300).tolist(), rng.integers(1, 65, 300).tolist()
    for window in (None, 8):
        groups = _group_chunks(starts, lengths, window)
        assert sorted(i for g in groups for i in g) == list(range(300)) and len(groups) <= 40
    small = _group_chunks(starts, lengths, None, 1 << 14)
    assert all(len(g) == 1 or len(g) * max(lengths[i] for i in g) * max(starts[i] + lengths[i] for i in g) <= 1 << 14 for g in small)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_b21_three_live_rows_in_a_batch_of_four_change_three_slots(dtype):
    kv = KVPool(1, 12, 4, 2, 8, dtype)
    poison(kv, 7.0, -7.0)
    kv.k[0][0] = kv.v[0][0] = NAN
    att = PagedAttention(kv, 4)
    before = kv.k[0].clone(), kv.v[0].clone()
    torch.manual_seed(0)
    q, k, v = (torch.randn(4, h, 8, dtype=dtype) for h in (4, 2, 2))
    q[2] = NAN
    live = torch.tensor([True, True, False, True])
    meta = att.decode_meta(torch.tensor([[5, 2], [11, 3], [0, 0], [1, 0]]), torch.tensor([6, 4, 0, 3]), live)
    out = att.decode(0, q, k, v, meta)
    for old, new in zip(before, (kv.k[0], kv.v[0])):
        changed = (new != old).any(-1).any(-1) & ~old.isnan().any(-1).any(-1)
        assert changed.nonzero().tolist() == [[1, 3], [2, 2], [3, 0]] and new[0].isnan().all()
    assert out.isfinite().all() and torch.count_nonzero(out[2]) == 0
    alone = att.decode(0, q[:2], k[:2], v[:2], att.decode_meta(torch.tensor([[5, 2], [11, 3]]), torch.tensor([6, 4]), live[:2]))
    torch.testing.assert_close(out[:2], alone, rtol=0, atol=1e-6)


def test_a_nan_sequence_poisons_nobody():
    "Its own output is NaN; rows beside it, and the next owner of its blocks, are not."
    att = PagedAttention(KVPool(1, 5, 4, 1, 8), 2)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 8) for h in (2, 1, 1))
    q[0] = k[0] = v[0] = NAN
    live = torch.tensor([True, True])
    out = att.decode(0, q, k, v, att.decode_meta(torch.tensor([[1], [2]]), torch.tensor([0, 0]), live))
    assert out[0].isnan().all() and out[1].isfinite().all()
    bad, ok = torch.full((6, 1, 8), NAN), torch.randn(5, 1, 8)
    att.prefill(0, torch.randn(6, 2, 8), bad, bad, att.prefill_meta([[3, 4]], [0], [6]))
    mixed = att.prefill(0, torch.randn(9, 2, 8), torch.cat((ok, bad[:4])), torch.cat((ok, bad[:4])), att.prefill_meta([[3, 4], [1, 0]], [0, 0], [5, 4]))
    assert mixed[:5].isfinite().all() and mixed[5:].isnan().any()     # blocks 3 and 4 have a new owner; slots 5..7 still hold NaN
    after = att.decode(0, *(torch.randn(1, h, 8) for h in (2, 1, 1)), att.decode_meta(torch.tensor([[3, 4]]), torch.tensor([5]), live[:1]))
    later = att.prefill(0, *(torch.randn(1, h, 8) for h in (2, 1, 1)), att.prefill_meta([[3, 4]], [6], [1]))
    assert after.isfinite().all() and later.isfinite().all()


@pytest.mark.parametrize("H,G", [(4, 2), (12, 12), (28, 4), (32, 8), (48, 2), (9, 3)])
def test_b24_query_head_reads_its_kv_head(H, G):
    att = PagedAttention(KVPool(1, 4, 4, G, 8), H)
    v = torch.arange(G).float()[None, :, None].expand(5, G, 8)
    want = [h // (H // G) for h in range(H)]
    for starts, sizes in (([0], [5]), ([2, 0], [3, 2])):
        out = att.prefill(0, torch.randn(5, H, 8), torch.randn(5, G, 8), v, att.prefill_meta([[1, 2], [3, 0]][:len(sizes)], starts, sizes))
        assert starts[0] or out[0, :, 0].round().int().tolist() == want   # a later chunk also sees the zeros of its unwritten past
        assert out[-1, :, 0].round().int().tolist() == want
    out = att.decode(0, torch.randn(1, H, 8), torch.randn(1, G, 8), v[:1], att.decode_meta(torch.tensor([[3]]), torch.tensor([2]), torch.tensor([True])))
    assert out[0, :, 0].round().int().tolist() == want


def test_b25_sliding_window_edge():
    "Prompt 6, generate 8; then block 4, prompt 21 in chunks of 5. Memory that left the window is NaN, so a read of it shows."
    torch.manual_seed(0)
    for block, prompt, total, chunk in ((16, 6, 14, 6), (4, 6, 14, 6), (4, 21, 29, 5), (4, 21, 29, 21)):
        table = (torch.randperm(30)[:-(-total // block)] + 1).tolist()
        kv = KVPool(1, 31, block, 2, 8, torch.float64)
        att = PagedAttention(kv, 4, windows=[8])
        q, k, v = (torch.randn(total, h, 8, dtype=torch.float64) for h in (4, 2, 2))
        want, seen = dense(q, k, v, 8), lambda i: list(range(max(0, i - 7), i + 1))
        def forget(i):   # what position i and all later ones do not see
            for p in range(max(0, i - 7)):
                for x in (kv.k[0], kv.v[0]): x[table[p // block], p % block] = NAN
        for s in range(0, prompt, chunk):
            e = min(prompt, s + chunk)
            forget(s)
            got = att.prefill(0, q[s:e], k[s:e], v[s:e], att.prefill_meta([table], [s], [e - s]))
            torch.testing.assert_close(got, want[s:e], rtol=0, atol=1e-12)
        for i in range(prompt, total):
            forget(i)
            meta = att.decode_meta(torch.tensor([table]), torch.tensor([i]), torch.tensor([True]))
            slots = meta.reads[min(8, len(table) * block)][0][0][0, 0].tolist()
            assert [s for s in slots if s != kv.zero_slot] == [table[p // block] * block + p % block for p in seen(i)]
            torch.testing.assert_close(att.decode(0, q[i:i + 1], k[i:i + 1], v[i:i + 1], meta)[0], want[i], rtol=0, atol=1e-12)


def test_blocks_are_copied_in_all_layers_and_sizes_are_told():
    kv = KVPool(3, 6, 4, 2, 8, torch.float16)
    for i in range(3): kv.k[i].normal_(); kv.v[i].normal_()
    old = [(k.clone(), v.clone()) for k, v in zip(kv.k, kv.v)]
    kv.copy_blocks(torch.tensor([1, 2], dtype=torch.int32), torch.tensor([2, 5], dtype=torch.int32))   # all reads come first
    for k, v, (ok, ov) in zip(kv.k, kv.v, old):
        for new, was in ((k, ok), (v, ov)): assert torch.equal(new[[2, 5]], was[[1, 2]]) and torch.equal(new[[0, 1, 3, 4]], was[[0, 1, 3, 4]])
    assert kv.k[1].is_contiguous() and KVPool.bytes_per_block(3, 4, 2, 8, torch.float16) == 3 * 2 * 4 * 2 * 8 * 2
    assert kv.nbytes == 6 * KVPool.bytes_per_block(3, 4, 2, 8, torch.float16) + 3 * 2 * 2 * 8 * 2


@pytest.mark.parametrize("make,word", [
    (lambda kv: PagedAttention(kv, 5), "multiple of 2"), (lambda kv: PagedAttention(kv, 4, windows=[None, 8]), "2 windows for 1"),
    (lambda kv: PagedAttention(kv, 4, windows=[0]), "window"), (lambda kv: PagedAttention(kv, 4).prefill_meta([[1]], [2], [3]), "3 tokens at 2"),
    (lambda kv: PagedAttention(kv, 4).prefill_meta([[1]], [0, 0], [1, 1]), "1 tables"), (lambda kv: KVPool(1, 1, 4, 2, 8), "n_blocks"),
    (lambda kv: KVPool(1, 4, 0, 2, 8), "block_size")])
def test_what_cannot_be_is_refused(make, word):
    with pytest.raises(ValueError, match=word): make(KVPool(1, 4, 4, 2, 8))
