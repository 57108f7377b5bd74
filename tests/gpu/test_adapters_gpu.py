"""Adapters on a GPU: mixed batches through captured steps and our own kernels, against merged models and against a torch program without graphs.

    PYTHONPATH=.:tests python3 -m pytest -q tests/gpu/test_adapters_gpu.py        (needs CUDA)
"""
import pytest
import torch
from llminfer.adapter_books import Adapters
from llminfer.adapters import make_adapter, merged, read_adapter
from llminfer.assembly import build_core
from llminfer.config import CacheConfig, EngineConfig
from llminfer.core import CoreConfig, make_core
from llminfer.cuda_graphs import GraphRunner
from llminfer.formats import read_safetensors
from llminfer.kernels import FusedProgram
from llminfer.layers import LayerProgram
from llminfer.loading import load_model, make_tiny, open_checkpoint
from llminfer.model import Transformer
from llminfer.request import SamplingParams
from llminfer.runner import TorchProgram

torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
NAMES = [None, "a", "b", "c"]


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    "A small model in fp32 with heads our kernels take, three adapters, and the merged models in fp64."
    tmp = tmp_path_factory.mktemp("lora")
    folder = make_tiny(tmp / "base", "qwen3", 0, hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64, intermediate_size=512)
    model = load_model(open_checkpoint(str(folder)), torch.float32, "cuda")
    kinds = dict(a=dict(r=4, alpha=8), b=dict(r=16, targets=["q_proj", "v_proj"]), c=dict(r=3, targets=["down_proj", "o_proj"]))
    paths = {n: make_adapter(tmp / n, model.config, i, **kw) for i, (n, kw) in enumerate(kinds.items())}
    w = {n: t.tensor(torch.float64) for n, t in read_safetensors(folder / "model.safetensors").items()}
    judges = {None: Transformer.from_tensors(model.config, w, torch.float64)}
    judges |= {n: Transformer.from_tensors(model.config, merged(w, read_adapter(p, model.config, torch.float64)), torch.float64) for n, p in paths.items()}
    return model, paths, judges


def go(core, books, jobs, n=20):
    base, out = core.next_id, {}
    for i, (ids, name) in enumerate(jobs): core.add([base + i], ids, [SamplingParams(temperature=0, max_tokens=n)], lora=books.lease(name).slot, key=books.lease(name).key(None))
    core.next_id += len(jobs)
    while core.has_work:
        for d in core.step():
            assert d.error is None, d.error
            out.setdefault(d.seq_id - base, []).extend(d.tokens.tolist())
    return [out[i] for i in range(len(jobs))]


def check(judge, ids, got):
    "Every token is the judge's own, or tied with it within the error of fp32 (design.md 4.2)."
    logits = judge.logits(list(ids) + got)[len(ids) - 1:-1]
    gap = logits.max(-1).values - logits.gather(1, torch.tensor(got)[:, None])[:, 0]
    assert gap.max() < 1e-3, gap.max()


@pytest.mark.parametrize("program", [TorchProgram, FusedProgram, LayerProgram])
@pytest.mark.parametrize("graphs", [False, True])
def test_mixed_batches_equal_merged_models(scene, program, graphs):
    model, paths, judges = scene
    books = Adapters(model)
    cfg = CoreConfig(n_blocks=400, block_size=16, max_num_seqs=16, max_model_len=128, window_steps=4, max_in_flight=2, max_num_batched_tokens=64)
    core = books.attach(make_core(model, cfg, program=program, **({"runner": GraphRunner} if graphs else {})))
    jobs = [([3 + (7 * i + 5 * j) % 400 for j in range(4 + 3 * i)], NAMES[i % 4]) for i in range(14)]
    for n in "ab": books.load(paths[n], n, activate=False)
    assert go(core, books, [j for j in jobs if j[1] is None])
    books.load(paths["c"], "c", activate=False)            # other products: old steps go
    for _ in range(3):                                     # uncaptured, captured, replayed
        for (ids, name), got in zip(jobs, go(core, books, jobs)): check(judges[name], ids, got)
    if graphs: assert any(k.variant.lora for k in core.runner.graphs) and not core.runner.failed
    for n in "abc": books.unload(n, 0) if not books.names[n].users else None


@pytest.mark.parametrize("load_at", [3, 9])
def test_loads_between_windows_in_flight_hurt_nobody(scene, load_at):
    "An adapter comes (and stacks move) while two windows are in flight."
    model, paths, judges = scene
    books = Adapters(model)
    core = books.attach(build_core(EngineConfig(device="cuda", cache=CacheConfig()), model, CoreConfig(n_blocks=400, max_num_seqs=8, max_model_len=128, window_steps=8, max_in_flight=2, follow=True)))
    books.load(paths["b"], "b", activate=False)
    ids, out = list(range(5, 25)), []
    core.add([0], ids, [SamplingParams(temperature=0, max_tokens=90)], lora=books.lease("b").slot)
    core.next_id, turns = 1, 0
    while core.has_work:
        for d in core.step(): out += d.tokens.tolist()
        turns += 1
        if turns == load_at: books.load(paths["a"], "a", activate=False)
    check(judges["b"], ids, out)
    free = torch.cuda.memory_allocated()
    books.names["b"].users = 0
    for n in "ab": books.unload(n)
    assert books.info()["bytes"] == 0 and torch.cuda.memory_allocated() < free
