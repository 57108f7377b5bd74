"""The Triton kernels under Triton's interpreter: attention, rotation, norms and the whole step against the torch program (its tail: test_draw.py); B21, B24, B25 of cases.md.

Triton decides when it is imported whether it interprets, so the tests run in a process of their own; the one test seen from outside starts it."""
import os
from support.own_process import run_alone

if os.environ.get("TRITON_INTERPRET") != "1":
    def test_kernels_under_the_interpreter(): run_alone(__file__)
else:
    import pytest
    import torch
    from llminfer import splitkv
    from llminfer.core import CoreConfig, generate, make_core
    from llminfer.interfaces import variant_of
    from llminfer.kernels import FusedProgram, feed_rows, fused_available
    from llminfer.layers import PartShape, RowCall, attend_parts
    from llminfer.splitkv import AttendShape, Places, attend, attend_prompt, attend_shape, prompt_tiles, rotate_write
    from llminfer.model import ForcedModel, Transformer, random_tensors
    from llminfer.request import SamplingParams
    from llminfer.runner import DecodeState, TorchProgram
    from support.kernel_scenes import Scene, config

    SHAPES = [AttendShape(1, 1, 16, 1, 16, 4, 1), AttendShape(1, 1, 8, 4, 8, 4, 1), AttendShape(0, 16, 16, 2, 16, 4, 1), AttendShape(0, 16, 8, 4, 8, 4, 1)]

    @pytest.mark.parametrize("case", range(10))
    def test_decode_attention_is_the_reference(case):
        "Random tables, lengths, dead rows, windows, head sizes, blocks and launches; both ways to write the new token; NaN everywhere else."
        E, (H, G), block = (64, 80, 96, 128, 16)[case % 5], ((4, 2), (3, 1), (4, 4), (6, 2))[case % 4], (4, 1, 3, 16)[case % 4]
        dtype, window = torch.float16 if case % 7 == 6 else torch.float32, (None, 1, 9)[case % 3]
        shape = SHAPES[case % 4]
        if not shape.U: shape = AttendShape(H // G, *list(vars(shape).values())[1:])
        a, b, c = (Scene(case, E, H, G, block, window, dtype, qk_norm=case % 2 == 0) for _ in range(3))
        tol, before = 3e-3 if dtype == torch.float16 else 2e-5, a.kv.data.clone()
        for layer in range(2):
            q, k, v = b.torch_heads(b.qkv, b.at.positions)
            want = b.att.decode(layer, q, k, v, b.att.decode_meta(b.st.table[:4], b.at.positions, b.live)).reshape(4, -1)
            got = attend(a.att, layer, rotate_write(a.att, layer, a.qkv, a.weight, 1e-6, a.at), a.weight, 1e-6, a.at, a.count, shape=shape)
            once = attend(c.att, layer, c.qkv, c.weight, 1e-6, c.at, c.count, fresh=True, shape=shape)
            for out in (got, once):
                assert not out.isnan().any() and (out[~a.live] == 0).all()
                assert (out.float() - want.float()).abs().max() < tol
        slots = {(int(a.st.table[r, n // block]), int(n % block)) for r, n in enumerate(a.lens) if a.live[r]}
        for x in (a, c):
            assert x.count.abs().max() == 0
            for layer in range(2):
                for pool, ref, first in ((x.kv.k, b.kv.k, 0), (x.kv.v, b.kv.v, a.kv.n_slots)):
                    changed = (pool[layer].nan_to_num(7.0) != before[layer, first:first + a.kv.n_slots].view_as(pool[layer]).nan_to_num(7.0)).any(-1).any(-1).nonzero().tolist()
                    assert {tuple(s) for s in changed} == slots                       # B21: exactly the live rows' slots
                    assert (pool[layer].nan_to_num(7.0) - ref[layer].nan_to_num(7.0)).abs().max() < tol

    @pytest.mark.parametrize("case, kv_dtype", [(0, "int8"), (1, "int8"), (2, "fp8"), (3, "int8"), (4, "int8"), (5, "fp8"), (6, "int8")])
    def test_coded_pages_are_read_and_written_as_the_reference_does(case, kv_dtype):
        """Both ways to write the new token and the parts of 15a; a code may fall to the other side of a step, no more.

        Triton's interpreter drops the carry when a mantissa rounds up to a power of two: 2% of its fp8 codes are half of what they should be,
        so int8 judges the numbers here, and fp8 on a device (tests/gpu)."""
        E, (H, G), dtype = (64, 80, 128, 64)[case % 4], ((4, 2), (3, 1), (4, 4), (6, 2))[case % 4], torch.float16 if case in (3, 6) else torch.float32
        shape = (AttendShape(1, 1, 8, 4, 8, 4, 1), AttendShape(H // G, 16, 16, 2, 16, 4, 1))[case % 2]
        if case > 3: shape = AttendShape(H // G, 8, 16, case % 2 + 1, 16, 4, 1)      # queries as columns
        a, b, c, d = (Scene(case, E, H, G, (4, 1, 16, 3)[case % 4], (None, 9)[case % 2], dtype, qk_norm=case % 2 == 0, kv_dtype=kv_dtype) for _ in range(4))
        call = RowCall(4, 1e-6, False, E, PartShape(4, 16, 4), {})
        before = a.kv.scales.clone()
        for layer in range(2):
            q, k, v = b.torch_heads(b.qkv, b.at.positions)
            want = b.att.decode(layer, q, k, v, b.att.decode_meta(b.st.table[:4], b.at.positions, b.live)).reshape(4, -1).float()
            got = attend(a.att, layer, rotate_write(a.att, layer, a.qkv, a.weight, 1e-6, a.at), a.weight, 1e-6, a.at, a.count, shape=shape)
            once = attend(c.att, layer, c.qkv, c.weight, 1e-6, c.at, c.count, fresh=True, shape=shape)
            part, stat = torch.empty(4 * H * 4, E, dtype=torch.float32), torch.empty(4, H, 4, dtype=torch.float32)
            attend_parts(call, d.att, layer, d.qkv, d.weight, d.at, part, stat)
            w = (stat - stat.amax(-1, True)).exp2()
            joined = torch.where(d.live[:, None], ((w / w.sum(-1, True))[..., None] * part.view(4, H, 4, E)).sum(2).reshape(4, -1), 0)
            for out in (got, once, joined):
                off = (out.float() - want).abs()
                if kv_dtype == "int8": assert off.max() < 0.02 and off.quantile(0.97) < (3e-3 if dtype == torch.float16 else 5e-5)
                else: assert off.mean() < 0.02
        for x in (a, c, d):
            changed = (x.kv.scales.nan_to_num(7.0) != before.nan_to_num(7.0)).any(-1)[:, :x.kv.n_slots].nonzero().tolist()
            at = [int(x.st.table[r, n // x.kv.block_size]) * x.kv.block_size + int(n) % x.kv.block_size for r, n in enumerate(x.lens) if x.live[r]]
            assert sorted(map(tuple, changed)) == sorted((layer, i) for layer in range(2) for i in at)      # B21: exactly the live rows' slots
            for layer in range(2):
                for mine, theirs in zip(x.kv.pages(layer)[2:], b.kv.pages(layer)[2:]):
                    assert torch.allclose(mine.view(-1, G)[at].float(), theirs.view(-1, G)[at].float(), rtol=2e-3)
                for mine, theirs in zip(x.kv.pages(layer)[:2], b.kv.pages(layer)[:2]):
                    assert (mine.view(-1, G, E)[at].float() == theirs.view(-1, G, E)[at].float()).float().mean() > 0.95

    @pytest.mark.parametrize("H, G", [(4, 2), (12, 12), (14, 2), (9, 3)])
    def test_query_heads_read_their_own_kv_head(H, G):
        "B24: each KV head holds its number."
        for shape in (AttendShape(1, 1, 8, 2, 8, 4, 1), AttendShape(H // G, 16, 8, 2, 8, 4, 1)):
            s = Scene(3, 16, H, G, 4, rows=2, most=20)
            for r, n in enumerate(s.lens):
                for i in range(n + 1): s.kv.v[0][s.st.table[r, i // 4], i % 4] = torch.arange(G, dtype=torch.float32)[:, None].expand(G, 16)
                for i in range(n + 1): s.kv.k[0][s.st.table[r, i // 4], i % 4] = 0.5
            out = attend(s.att, 0, s.randn(2, H, 16), None, 1e-6, s.at, s.count, shape=shape).view(2, H, 16)[s.live]
            assert torch.allclose(out, (torch.arange(H) // (H // G)).float()[:, None].expand(H, 16).expand_as(out), atol=1e-5)

    def test_a_prompt_fed_as_places_and_as_tiles(monkeypatch):
        "Several tokens of one row in one launch; chunks with a past, longer than a tile, under a window."
        monkeypatch.setattr(splitkv, "prompt_tile", lambda E, itemsize: 16)
        for window, layer in ((None, 0), (5, 1)):
            a, b = (Scene(5, 64, 4, 2, 4, window, most=36, rows=2, qk_norm=window is None) for _ in range(2))
            for s in (a, b):
                for r in range(2):
                    for i in range(9): s.st.table[r, i] = 2 + 9 * r + i
            starts, lengths = [int(min(n, 12)) for n in a.lens], [17, 4]
            pos = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lengths)])
            for s in (a, b):
                for t in (*s.kv.k, *s.kv.v):
                    g = torch.Generator().manual_seed(1)
                    t[2:] = torch.randn(t[2:].shape, generator=g)
            owner, qkv = torch.tensor([0] * 17 + [1] * 4), a.randn(21, 8 * 64)
            at = Places(a.st, owner, pos, torch.ones(21, dtype=torch.bool), a.at.cos, a.at.sin)
            tiles, rows = torch.from_numpy(prompt_tiles(starts, lengths, 16)), torch.tensor([0, 1])
            q, k, v = b.torch_heads(qkv, pos)
            want = b.att.prefill(layer, q, k, v, b.att.prefill_meta(b.st.table[:2], starts, lengths)).reshape(21, -1)
            mine = rotate_write(a.att, layer, qkv, a.weight, 1e-6, at)
            for out in (attend_prompt(a.att, layer, mine, tiles, rows, a.st), attend(a.att, layer, mine, a.weight, 1e-6, at, a.count, shape=AttendShape(2, 16, 16, 2, 16, 4, 1))):
                assert (out - want).abs().max() < 2e-5
            assert (a.kv.k[layer][2:] - b.kv.k[layer][2:]).abs().max() < 1e-5 and (a.kv.v[layer][2:] == b.kv.v[layer][2:]).all()

    def test_feed_is_what_the_state_says():
        st = DecodeState(8, 32, 4)
        g = torch.Generator().manual_seed(0)
        st.ints[:, :8] = torch.randint(0, 30, (len(st.ints), 8), generator=g)
        st.quota[:8], st.status[:8] = torch.tensor([2, 1, 3, 1, 0, 2, 1, 4]), torch.tensor([1, 1, 1, 1, 1, 3, 0, 1])
        rows = torch.tensor([3, 0, 1, 2, 4, 5, 6, 7, 8, 8])
        ids, positions, n_total, act = feed_rows(st, rows)
        assert (ids == st.token[rows]).all() and (positions == st.len[rows]).all() and (n_total == st.len[rows] + 1).all() and (act == st.live(rows)).all()

    PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [40, 41], [100], [5, 6, 7, 8, 9, 10, 200]]

    @pytest.mark.parametrize("kw", [dict(), dict(qk_norm=False, window=6, attention_bias=True, o_bias=True, mlp_bias=True)], ids=["qwen3", "llama window biases"])
    def test_engine_says_what_the_torch_program_says(kw):
        c = config(**kw)
        model = Transformer.from_tensors(c, random_tensors(c, 3))
        params = [SamplingParams(temperature=0, max_tokens=6, presence_penalty=0.5), SamplingParams(temperature=1.2, seed=1, top_p=0.9, max_tokens=3, logit_bias=((7, 4.0),)),
                  SamplingParams(temperature=0.9, seed=3, top_k=30, max_tokens=5, repetition_penalty=1.3), SamplingParams(temperature=0, max_tokens=4)]
        logged = [SamplingParams(temperature=0.8, seed=4, max_tokens=4, logprobs=2), SamplingParams(temperature=0.8, seed=5, max_tokens=5, no_repeat_ngram_size=1, bad_words_ids=((9, 8), (7,)))] * 2
        for asked, in_torch in ((params, False), (logged, True)):
            texts = []
            for program in (TorchProgram, FusedProgram):
                core = make_core(model, CoreConfig(n_blocks=40, block_size=3 if kw else 4, max_num_seqs=3, max_model_len=32, window_steps=2, prefill_chunk=7), program=program)
                texts.append(generate(core, PROMPTS, asked))
                assert core.scheduler.pool.n_held == 0
            assert texts[0] == texts[1]
            p = core.runner.program
            assert (p.info()["torch_tail_steps"] > 0) == in_torch and p.fuses(variant_of(asked[0])) != in_torch

    def test_logits_of_distinct_places():
        "`distinct` and the launch with its own write give the same logits, and the torch program's."
        c = config()
        model = Transformer.from_tensors(c, random_tensors(c, 4))
        outs = []
        for kind in range(3):
            s = Scene(7)
            program = (TorchProgram if kind == 0 else FusedProgram)(model, s.att)
            hidden = program.decode(s.st, torch.tensor([1, 2, 3, 4]), s.at.rows, s.at.positions, s.live, 11, **(dict(distinct=True) if kind == 2 else {}))
            outs.append(program.head(hidden)[s.live])
        assert (outs[1] - outs[0]).abs().max() < 1e-4 and (outs[2] - outs[1]).abs().max() < 1e-5

    def test_refusals_name_the_reason():
        make = lambda E=64, dtype=torch.float32: Transformer.from_tensors(c := config(E), random_tensors(c), dtype)
        for model, device, words in ((make(32), "cpu", "head size 32"), (make(dtype=torch.float64), "cpu", "float64"), (ForcedModel(), "cpu", "ForcedModel")):
            ok, why = fused_available(model, device)
            assert not ok and words in why
        with pytest.raises(ValueError, match="head size 32"): FusedProgram(make(32), None)
        assert fused_available(make(), "cpu")[0]
        shape = attend_shape(1, 12, 4, 64, 512)
        assert (shape.U, shape.M) == (1, 1) and shape.S // 2 * shape.least < 512 and attend_shape(256, 12, 4, 64, 512).U == 3
        for B in range(1, 600): assert (s := attend_shape(B, 16, 8, 128, 4096)).S & (s.S - 1) == 0 and (s.S == 1 or B * 16 // s.U <= 8192)
