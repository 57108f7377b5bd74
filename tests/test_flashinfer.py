"""FlashInfer's adapter without FlashInfer: the host's account of lengths against the device's at every step, the pages it names, and the engine on stand-ins
that read the same plans (case B23's CPU half). What FlashInfer itself computes is tested in tests/gpu/test_flashinfer.py.

The stand-ins sit in kernels of ours, so that part runs under Triton's interpreter in a process of its own."""
import os
from types import SimpleNamespace
import numpy as np
import pytest
import torch
from llminfer.assembly import choose_parts
from llminfer.config import ConfigError, EngineConfig
from llminfer.core import CoreConfig, generate, make_core
from llminfer.flashinfer_adapter import Account, EagerFlashInferRunner, FlashInferProgram, FlashInferRunner, flashinfer_available, page_plan
from llminfer.interfaces import RowStatus, Variant
from llminfer.loading import load_model, make_tiny, open_checkpoint
from llminfer.model import Transformer, random_tensors
from llminfer.request import SamplingParams
from llminfer.runner import TorchProgram, TorchRunner, decode_step, set_quotas
from support.arrays import core_for, pairwise, run, tiny_prompts
from support.kernel_scenes import config
from support.own_process import run_alone

if os.environ.get("TRITON_INTERPRET") != "1":
    class Watched(TorchRunner):
        "Compares the account with the device before every step; a CPU may look."
        def __init__(self, *args, **kw):
            super().__init__(*args, **kw)
            self.account, self.steps, self.ended = Account(self.state.max_rows), 0, 0

        def launch(self, plan):
            self.account.admit(plan)
            return super().launch(plan)

        def window(self, plan, t):
            st, rows, keys = self.state, self.state.put(plan.rows.astype(np.int64)), self.account.window(plan)
            set_quotas(self, plan, rows)
            for i in range(plan.K):
                live = st.live(rows).numpy()
                assert (keys[i][live] == st.len[rows].numpy()[live] + 1).all()                     # exact where it matters
                over = ~live & (keys[i] > 0)
                assert (st.status[rows].numpy()[over] != RowStatus.LIVE).all()                     # the rest ended on the device, unseen
                p = page_plan(plan.rows.astype(np.int64), keys[i], len(rows) + 2, st.block_size, st.table.shape[1])
                assert (st.table.view(-1)[torch.from_numpy(p.cells).long()] > 0).all()             # every page named is a reserved one
                assert (p.last[len(rows):] == 1).all() and (np.diff(p.indptr)[len(rows):] == 0).all()
                self.steps, self.ended = self.steps + int(live.sum()), self.ended + int(over.sum())
                decode_step(self, rows, -(-plan.max_len // st.block_size), plan.variant)
                t.note(plan.rows)

    @pytest.fixture(scope="module")
    def tiny(tmp_path_factory):
        return load_model(open_checkpoint(str(make_tiny(tmp_path_factory.mktemp("m"), "llama", 0))), torch.float64, "cpu")

    @pytest.mark.parametrize("row", range(len(pairwise())))
    def test_the_host_counts_what_the_device_has(tiny, row):
        "Chunks, windows, preemption, cached prefixes, company that comes and goes: an exact length for every row that is alive."
        row, prompts = pairwise()[row], tiny_prompts(512)
        core = core_for(tiny, row, prompts, 12, rows=5, runner=Watched)
        assert run(core, row, prompts, 12) == run(core_for(tiny, row, prompts, 12, rows=5), row, prompts, 12)
        assert core.runner.steps > 60

    def test_ends_that_the_host_has_not_seen_and_forks(tiny):
        core = make_core(tiny, CoreConfig(n_blocks=80, block_size=4, max_num_seqs=6, max_model_len=64, window_steps=8, max_in_flight=2, follow=True), runner=Watched)
        prompts, ends = tiny_prompts(512), tuple(range(0, 512, 20))
        for i, p in enumerate(prompts[:6]):
            core.add([3 * i, 3 * i + 1, 3 * i + 2], p, [SamplingParams(temperature=1.0, seed=i, child=c, max_tokens=30 if len(p) < 34 else 20, eos_ids=ends) for c in range(3)])
        while core.has_work: core.step()
        assert core.runner.ended > 20 and core.scheduler.pool.n_held == 0

    def test_page_plans():
        "Any lengths, blocks and padding: the pages in order, the keys in the last one, nothing for places without keys."
        rng = np.random.default_rng(0)
        for _ in range(200):
            block, width, n = int(rng.integers(1, 20)), int(rng.integers(1, 9)), int(rng.integers(0, 7))
            rows, keys, size = rng.permutation(9)[:n], rng.integers(0, block * width + 1, n), n + int(rng.integers(0, 4))
            p = page_plan(rows, keys, size, block, width)
            assert len(p.indptr) == size + 1 and len(p.last) == size and p.indptr.dtype == p.last.dtype == p.cells.dtype == np.int32
            for b in range(size):
                mine = p.cells[p.indptr[b]:p.indptr[b + 1]].tolist()
                k = int(keys[b]) if b < n else 0
                assert mine == [rows[b] * width + j for j in range(-(-k // block))] if k else mine == [] and p.last[b] == 1
                if k: assert (len(mine) - 1) * block + p.last[b] == k and 1 <= p.last[b] <= block

    @pytest.mark.parametrize("settings, words", [(dict(attention_backend="flashinfer"), "flashinfer' cannot run here"), (dict(attention_backend="flashinfer", kernels="torch"), "change one of them"),
        (dict(attention_backend="triton", kernels="torch"), "change one of them"), (dict(attention_backend="torch", kernels="triton"), "change one of them"),
        (dict(attention_backend="triton"), "attention_backend='triton' cannot run here")])
    def test_a_forced_choice_that_cannot_be_had_is_named(tiny, settings, words):
        with pytest.raises(ConfigError, match=words): choose_parts(EngineConfig(**settings), tiny)

    def test_choices_carry_reasons(tiny):
        assert choose_parts(EngineConfig(attention_backend="torch"), tiny).reasons == {"kernels": "torch (as asked)", "steps": "eager (nothing to capture on a CPU)", "attention": "torch (SDPA over gathered pages)",
            "speculation": "prompt lookup, up to 8 tokens a step"}
        assert set(choose_parts(EngineConfig(), tiny).reasons) == {"kernels", "steps", "attention", "speculation"}

    @pytest.mark.parametrize("model, there, words", [(dict(head_dim=80), True, "head sizes 64, 128 and 256, not for 80"), (dict(dtype=torch.float32), True, "not in torch.float32"),
        (dict(), False, "not installed"), (dict(), None, "nvcc and ninja")])
    def test_what_flashinfer_cannot_do_here(monkeypatch, model, there, words):
        import llminfer.flashinfer_adapter as f
        def version(name):
            if there is False: raise f.PackageNotFoundError(name)
            return "0.6.14"
        for name, value in (("fused_available", lambda m, d: (True, "")), ("interpreted", lambda: False), ("version", version), ("compiler", lambda: there is not None)): monkeypatch.setattr(f, name, value)
        m = SimpleNamespace(dtype=model.get("dtype", torch.bfloat16), config=SimpleNamespace(head_dim=model.get("head_dim", 64)))
        ok, why = flashinfer_available(m, "cuda")
        assert not ok and words in why

    def test_the_engine_on_stand_ins(): run_alone(__file__)
else:
    def attention(q, keys, values, scale, causal_from, window_left):
        "Rows q [n, H, E] at positions causal_from, causal_from + 1, ... over keys [L, G, E]."
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (keys, values))
        i, j = torch.arange(len(q))[:, None] + causal_from, torch.arange(len(k))[None]
        hidden = (j > i) | ((j < i - window_left) if window_left >= 0 else False)
        return torch.einsum("hij,jhe->ihe", (torch.einsum("ihe,jhe->hij", q, k) * scale).masked_fill(hidden, -torch.inf).softmax(-1), v)

    class StandIn:
        "What both wrappers have in common: a plan is copied where the buffers are, a run sees the buffers and nothing else."
        made: list = []
        def __init__(self, work, *args, **kw):
            self.buffers, self.plans = [a for a in args if isinstance(a, torch.Tensor)], 0
            StandIn.made.append(self)

        def remember(self, indptr, pages, last, H, G, E, block, window_left, sm_scale, q_data_type, kv_data_type):
            assert all(t.dtype == torch.int32 for t in (indptr, pages, last)) and self._pin_memory_int_workspace_buffer.numel() and self._int_workspace_buffer.numel()
            assert last.min() >= 1 and last.max() <= block
            self.window, self.scale, self.plans = window_left, sm_scale, self.plans + 1

        def of(self, b, pool, indptr, pages, last):
            mine = pages[indptr[b]:indptr[b + 1]].long()
            return pool[mine].flatten(0, 1)[:(len(mine) - 1) * pool.shape[1] + int(last[b]) if len(mine) else 0]

    class Decode(StandIn):
        def plan(self, indptr, pages, last, *heads, **kw):
            self.remember(indptr, pages, last, *heads, **kw)
            for buffer, t in zip(self.buffers, (indptr, pages, last)): buffer[:len(t)].copy_(t)

        def run(self, q, pools):
            rows = [[self.of(b, p, *self.buffers) for p in pools] for b in range(len(q))]
            return torch.cat([attention(q[b:b + 1], k, v, self.scale, len(k) - 1, self.window) if len(k) else torch.full_like(q[b:b + 1], torch.nan) for b, (k, v) in enumerate(rows)])

    class Prefill(StandIn):
        def plan(self, queries, indptr, pages, last, *heads, causal, **kw):
            self.remember(indptr, pages, last, *heads, **kw)
            assert causal
            self.queries, self.buffers = queries, [indptr, pages, last]

        def run(self, q, pools):
            out = []
            for b, (lo, hi) in enumerate(zip(self.queries.tolist(), self.queries[1:].tolist())):
                k, v = (self.of(b, p, *self.buffers) for p in pools)
                out.append(attention(q[lo:hi], k, v, self.scale, len(k) - (hi - lo), self.window))
            return torch.cat(out)

    class Program(FlashInferProgram): makers = (Decode, Prefill)

    @pytest.mark.parametrize("runner, window", [(FlashInferRunner, 6), (EagerFlashInferRunner, None)])
    def test_the_texts_of_the_torch_program(runner, window):
        "Captured (each replay takes a new plan) and eager; a layer with a window has plans of its own; rows end in mid-window; padding places give NaN here and 0 to the layers."
        c = config(window=window)
        model = Transformer.from_tensors(c, random_tensors(c, 3))
        prompts = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [40, 41], [100], [5, 6, 7, 8, 9, 10, 200]]
        params = [SamplingParams(temperature=0, max_tokens=n, **kw) for n, kw in ((6, {}), (3, {}), (5, dict(eos_ids=tuple(range(0, 300, 3)))), (4, {}))]
        cfg = CoreConfig(n_blocks=40, block_size=4, max_num_seqs=3, max_model_len=32, window_steps=3, max_in_flight=2, follow=True, prefill_chunk=7)
        want = generate(make_core(model, cfg, program=TorchProgram), prompts, params)
        core = make_core(model, cfg, program=Program, runner=runner)
        for _ in range(2): assert generate(core, prompts, params) == want
        info, kinds = core.runner.info(), {w.window for w in StandIn.made[-4:]}
        assert info["decode_plans"] > 8 and info["waits_for_a_buffer"] == 0 and core.scheduler.pool.n_held == 0
        assert kinds == ({-1} if window is None else {-1, 5})
        if runner is FlashInferRunner: assert core.runner.graphs and sum(g.uses for g in core.runner.graphs.values()) > 4 and not core.runner.failed

    def test_a_step_without_its_plan_is_refused():
        c = config()
        core = make_core(Transformer.from_tensors(c, random_tensors(c, 3)), CoreConfig(max_num_seqs=3, max_model_len=32), program=Program, runner=EagerFlashInferRunner)
        r = core.runner
        with pytest.raises(RuntimeError, match="a decode step of 2 places was not planned"): decode_step(r, torch.tensor([0, 1]), 1, Variant())

    def test_kernels_that_cannot_be_built_are_an_error_at_the_start():
        class Broken(Decode):
            def plan(self, *args, **kw): raise RuntimeError("Ninja build failed.\nmany lines")
        class Bad(FlashInferProgram): makers = (Broken, Prefill)
        c = config()
        with pytest.raises(ConfigError, match=r"planned here \(Ninja build failed\.\); choose auto"):
            make_core(Transformer.from_tensors(c, random_tensors(c, 3)), CoreConfig(max_num_seqs=3, max_model_len=32), program=Bad, runner=FlashInferRunner)
