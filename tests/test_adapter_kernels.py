"""The adapter kernel under Triton's interpreter: alone against the torch products, and mixed batches through the fused programs against merged models.

Triton decides when it is imported whether it interprets, so the tests run in a process of their own; the one test seen from outside starts it."""
import os
import subprocess
import sys
from pathlib import Path

if os.environ.get("TRITON_INTERPRET") != "1":
    def test_the_adapter_kernel_under_the_interpreter():
        r = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", __file__], capture_output=True, text=True, cwd=Path(__file__).resolve().parents[1],
                           env=os.environ | {"TRITON_INTERPRET": "1"})
        print(r.stdout[-4000:], r.stderr[-2000:])
        assert r.returncode == 0 and " passed" in r.stdout, r.stdout[-4000:] + r.stderr[-2000:]
else:
    import pytest
    import torch
    from llminfer import adapters
    from llminfer.adapter_books import Adapters
    from llminfer.adapters import make_adapter, merged, own_pairs, own_share, read_adapter, tile_width
    from llminfer.core import CoreConfig, make_core
    from llminfer.formats import read_safetensors
    from llminfer.kernels import FusedProgram
    from llminfer.layers import LayerProgram
    from llminfer.loading import load_model, make_tiny, open_checkpoint
    from llminfer.model import Transformer
    from llminfer.request import SamplingParams

    @pytest.mark.parametrize("case", range(6))
    def test_the_kernel_is_the_gather(case):
        "Parts, ranks that are no power of two, rows beyond a tile, nobody's rows; infinities of others stay theirs."
        g = torch.Generator().manual_seed(case)
        T, S, r, K = (1, 5, 16, 17, 40, 70)[case], (1, 2, 4, 3, 8, 2)[case], (4, 16, 5, 20, 8, 33)[case], 24
        cuts = ([(0, 64)], [(0, 64), (64, 96)], [(0, 64), (64, 80), (80, 96)])[case % 3]
        N, new = cuts[-1][1], lambda *s: torch.randn(*s, generator=g)
        a, b, x, y, slots = new(len(cuts), S, r, K), new(S, r, N), new(T, K), new(T, N), torch.randint(0, S + 1, (T,), generator=g)
        if T > 1: x[0], slots[0] = float("inf"), 0
        ys, share, t = (y.clone(), y.clone()), torch.full_like(y, float("nan")), torch.mm(x, a.view(-1, K).t())
        own_share(ys[0], t, a, b, cuts, slots, True)
        own_share(share, t, a, b, cuts, slots, False)
        own_pairs(ys[1], x, a, b, cuts, slots)
        assert torch.allclose(y + share, ys[0], atol=1e-5) and not share[slots == 0].any()
        assert tile_width(cuts) >= 16 and torch.allclose(ys[0], ys[1], atol=1e-3) and torch.equal(ys[0][slots == 0], y[slots == 0])

    @pytest.mark.parametrize("program, split", [(FusedProgram, True), (LayerProgram, False)])
    def test_fused_programs_with_adapters(program, split, tmp_path, monkeypatch):
        "Changes that the reader adds, and, as on one of several ranks, changes added to the product."
        shares = []
        monkeypatch.setattr(adapters, "own_share", lambda *a: (shares.append(a[-1]), own_share(*a)))
        folder = make_tiny(tmp_path / "base", "qwen3", 0, hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=64, intermediate_size=64)
        model = load_model(open_checkpoint(str(folder)), torch.float32, "cpu", linear=__import__("llminfer.model").model.Dense)
        w = {n: t.tensor(torch.float64) for n, t in read_safetensors(folder / "model.safetensors").items()}
        judges, books = {None: Transformer.from_tensors(model.config, w, torch.float64)}, Adapters(model)
        core = books.attach(make_core(model, CoreConfig(n_blocks=32, block_size=8, max_num_seqs=3, max_model_len=32), program=program))
        for i, n in enumerate("ab"):
            make_adapter(tmp_path / n, model.config, i, r=4 + 3 * i)
            books.load(tmp_path / n, n, activate=False)
            books.stacks.places.split = split
            judges[n] = Transformer.from_tensors(model.config, merged(w, read_adapter(tmp_path / n, model.config, torch.float64)), torch.float64)
        out, jobs = {}, [([5, 9, 11 + i], n) for i, n in enumerate([None, "a", "b"])]
        for i, (ids, n) in enumerate(jobs): core.add([i], ids, [SamplingParams(temperature=0, max_tokens=4)], lora=books.lease(n).slot)
        while core.has_work:
            for d in core.step():
                assert d.error is None, d.error
                out.setdefault(d.seq_id, []).extend(d.tokens.tolist())
        for i, (ids, n) in enumerate(jobs):
            logits = judges[n].logits(ids + out[i])[len(ids) - 1:-1]
            assert (logits.max(-1).values - logits.gather(1, torch.tensor(out[i])[:, None])[:, 0]).max() < 1e-3
        assert books.stacks.places.kernels and len(shares) % 4 == 0 and shares.count(True) == len(shares) // (1 if split else 4)
