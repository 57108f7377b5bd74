"""Cases of the bug log that need a GPU: padding of captured steps (B21), heads under bitsandbytes (B27), compiled 4-bit layers (B28).

    PYTHONPATH=.:tests python3 -m pytest -q tests/gpu/test_cases_gpu.py

B23 (plans and replays in step) is in test_flashinfer.py and test_kernels_gpu.py; buckets and real failures to capture (B22, F21) are in test_gpu.py."""
import pytest
import torch
from llminfer.config import EngineConfig, QuantConfig, QuantMode
from llminfer.core import CoreConfig, generate, make_core
from llminfer.cuda_graphs import GraphRunner
from llminfer.engine import InferenceEngine
from llminfer.loading import load_model, make_tiny, open_checkpoint
from llminfer.quant_formats import load_quantized
from llminfer.quantization import QuantPlan, expanded, quantise_linear
from llminfer.request import SamplingParams
from llminfer.runner import TorchRunner
from support.arrays import tiny_prompts


@pytest.mark.parametrize("n_live, size", [(3, 4), (5, 8)])
def test_B21_three_live_rows_in_a_captured_bucket(tmp_path, monkeypatch, n_live, size):
    "Real graphs whose bucket is larger than the batch: only the live rows' blocks change, NaN in the null block reaches nobody, texts are the eager ones."
    monkeypatch.setattr("llminfer.cuda_graphs.graph_sizes", lambda most: [s for s in (1, 4, 8) if s <= most])
    model = load_model(open_checkpoint(make_tiny(tmp_path, "llama", 0)), torch.float32, "cuda")
    cfg = CoreConfig(n_blocks=120, block_size=4, max_num_seqs=8, max_model_len=40, window_steps=3, prefix_cache=False)
    prompts, params = [p[:20] for p in (tiny_prompts(512) * 2)[:n_live]], [SamplingParams(temperature=0, max_tokens=9 + i % 4) for i in range(n_live)]
    want = generate(make_core(model, cfg, runner=TorchRunner), prompts, params)
    core = make_core(model, cfg, runner=GraphRunner)
    for _ in range(2): assert generate(core, prompts, params) == want
    assert any(k.kind == "decode" and k.size == size for k in core.runner.graphs), list(core.runner.graphs)
    kv, held, reserve = core.runner.kv, set(), core.scheduler.pool.reserve
    for layer in range(model.config.n_layers):
        for t in (kv.k[layer], kv.v[layer]):
            t[:] = 7.0
            t[0] = float("nan")
    core.scheduler.pool.reserve = lambda s, n: (held.update(b.tolist()) if (b := reserve(s, n)) is not None else None, b)[1]
    core.runner.state.table[:] = 0
    assert generate(core, prompts, params) == want
    others = [b for b in range(1, 120) if b not in held]
    assert all((t[others] == 7.0).all() and t[0].isnan().all() for layer in range(model.config.n_layers) for t in (kv.k[layer], kv.v[layer]))


@pytest.mark.parametrize("mode", [QuantMode.INT8, QuantMode.NF4, QuantMode.FP4])
@pytest.mark.parametrize("tied", [True, False])
def test_B27_heads_stay_dense_with_bitsandbytes(tmp_path, mode, tied):
    "transformers' own layers: no head and no embedding is quantised, one forward works, and the error is that of the format."
    bnb = pytest.importorskip("bitsandbytes")
    folder = make_tiny(tmp_path / "m", "llama", 0, tie_word_embeddings=tied, hidden_size=128, intermediate_size=256)
    e = InferenceEngine(EngineConfig(str(folder), backend="eager", device="cuda", quant=QuantConfig(mode))).load()
    net = e.backend.model.net
    quantised = (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)
    assert not isinstance(net.get_output_embeddings(), quantised) and net.get_input_embeddings().weight.is_floating_point()
    assert any(isinstance(m, quantised) for m in net.modules())
    ids = torch.tensor([[5, 9, 300, 41, 7]], device="cuda")
    with torch.inference_mode(): got = net(ids).logits.float()
    ckpt = open_checkpoint(folder)
    want, same = load_model(ckpt, torch.float32, "cuda").logits(ids[0]), expanded(load_quantized(ckpt, QuantPlan(mode.value), torch.float32, "cuda")).logits(ids[0])
    error, of_format = ((x - want).norm() / want.norm() for x in (got[0], same))
    assert got.isfinite().all() and error < max(1.25 * of_format, 0.2), (error, of_format)      # int8 also rounds what it multiplies
    assert len(e.run("hello", max_new_tokens=4, temperature=0.0).token_ids) >= 1
    e.unload()


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int4", "int8"])
def test_B28_a_4_bit_layer_compiles_on_a_gpu(kind):
    p = quantise_linear(QuantPlan(kind), torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).cuda() / 8, None, "x")
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: p(x), fullgraph=True)
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
        for rows in (1, 5):
            x = torch.randn(rows, 64, device="cuda").to(dtype)
            with torch.inference_mode(): assert torch.allclose(compiled(x).float(), p(x).float(), atol=2e-2, rtol=2e-2)
