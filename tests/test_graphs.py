"F21 of cases.md: 20 of 20 failures to capture a step or to compile a kernel leave an engine that runs without, says so once, and writes the same texts."
import logging
from types import SimpleNamespace
import pytest
import torch
from llminfer import assembly
from llminfer.config import ConfigError, EngineConfig
from llminfer.core import CoreConfig, generate, make_core
from llminfer.cuda_graphs import GraphRunner
from llminfer.layers import LayerProgram
from llminfer.loading import load_model, make_tiny, open_checkpoint
from llminfer.request import SamplingParams
from llminfer.runner import TorchProgram
from llminfer.tracing import inject
from support.arrays import tiny_prompts

FAILURES = [RuntimeError("CUDA error: operation not permitted when stream is capturing"), torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), ValueError("a shape"),
            OSError(28, "No space left on device"), NotImplementedError("op"), AssertionError(), KeyError("kernel"), TypeError("arg"), Exception("many\nlines")]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    model = load_model(open_checkpoint(str(make_tiny(tmp_path_factory.mktemp("m"), "llama", 0))), torch.float64, "cpu")
    prompts = tiny_prompts(512)[:5]
    params = [SamplingParams(temperature=0, max_tokens=9), SamplingParams(temperature=0.9, seed=3, top_k=9, max_tokens=7)] * 3
    cfg = CoreConfig(n_blocks=60, block_size=4, max_num_seqs=3, max_model_len=64, window_steps=4, max_in_flight=2)
    return model, cfg, prompts, params[:5], generate(make_core(model, cfg), prompts, params[:5])


@pytest.mark.parametrize("fault", FAILURES, ids=repr)
def test_a_step_that_cannot_be_captured_stays_eager(tiny, fault, caplog):
    model, cfg, prompts, params, want = tiny
    core = make_core(model, cfg, runner=GraphRunner)
    with inject("graphs.capture", fault, times=1000), caplog.at_level(logging.WARNING, "llminfer"):
        for _ in range(2): assert generate(core, prompts, params) == want
    r = core.runner
    assert not r.graphs and len(r.failed) > 2 and r.trace.counters["graph_failures"] == len(r.failed)   # each tried once
    assert [type(fault).__name__ in m for m in caplog.messages] == [True] and core.scheduler.pool.n_held == 0


@pytest.mark.parametrize("fault", FAILURES, ids=repr)
def test_a_gpu_whose_compiler_is_broken_runs_on_torch(monkeypatch, fault, caplog):
    monkeypatch.setattr(assembly, "fused_available", lambda model, device: (True, "compute capability 9.0"))
    model = SimpleNamespace(device=torch.device("cuda"))
    assembly.kernel_trial.cache_clear()
    try:
        with inject("kernels.compile", fault, times=1000), caplog.at_level(logging.WARNING, "llminfer"):
            for _ in range(2): parts = assembly.choose_parts(EngineConfig(), model)
            with pytest.raises(ConfigError, match="kernels='triton' cannot run here: Triton cannot compile here"): assembly.choose_parts(EngineConfig(kernels="triton"), model)
        assert (parts.runner, parts.program) == (GraphRunner, TorchProgram) and len(caplog.messages) == 1
        assert parts.reasons["kernels"].startswith("torch (Triton cannot compile here: ") and "\n" not in parts.reasons["kernels"]
    finally: assembly.kernel_trial.cache_clear()
    monkeypatch.setattr(assembly, "kernel_trial", lambda device: "")
    assert assembly.choose_parts(EngineConfig(), model).program is LayerProgram
