"""The cases of the bug log that no other file has: graphs and their padding (B21, B22), compiled 4-bit layers (B28), middleware (B35), a loop that runs already (B37); and the index of all forty."""
from __future__ import annotations
import ast, asyncio, itertools, json, logging, socket, time
from functools import cache
import pytest
import torch
from starlette.middleware.base import BaseHTTPMiddleware
from house import ROOT
from llminfer.api import create_openai_app
from llminfer.config import EngineConfig
from llminfer.core import CoreConfig, generate, make_core
from llminfer.cuda_graphs import GraphRunner, fit, graph_sizes
from llminfer.engine import InferenceEngine
from llminfer.quantization import QuantPlan, quantise_linear
from llminfer.request import SamplingParams
from llminfer.runner import TorchRunner
from llminfer.tracing import inject
from support.api import Server, http_bytes, tiny_http
from support.arrays import tiny_prompts
from support.cases import CASES
from support.engines import clean as clean, tiny


@cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / f"{file}.py").read_text(encoding="utf-8"))
    return {n.name for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}


def test_all_forty_cases_have_tests_that_exist():
    assert list(CASES) == [f"B{i:02}" for i in range(1, 41)]
    for case, names in CASES.items():
        for file, name in (x.split("::") for x in names.split()): assert f"test_{name}" in functions_of(file), f"{case}: there is no {file}.py::test_{name}"
        assert any(not x.startswith("gpu/") for x in names.split()), f"{case} is not tested without a GPU"


def test_no_case_is_forgotten_in_the_index():
    "Every test that is named after a case stands in its row."
    for p in (ROOT / "tests").rglob("test_*.py"):
        file = p.relative_to(ROOT / "tests").with_suffix("").as_posix()
        for name in functions_of(file):
            case = name.removeprefix("test_")[:3].upper()
            if case in CASES and name[8:9] == "_": assert f"{file}::{name.removeprefix('test_')}" in CASES[case], f"{file}::{name} is not in the row of {case}"


# B21, B22: captured steps

@pytest.mark.parametrize("n_live, size", [(1, 1), (3, 4), (5, 8), (13, 16), (17, 24)])
def test_B21_padding_places_of_a_graph_write_nothing(n_live, size, monkeypatch):
    "The graph's places beyond the live rows: no slot but the live rows' changes, the null block may hold NaN, texts are the eager ones."
    monkeypatch.setattr("llminfer.cuda_graphs.graph_sizes", lambda most: [s for s in (1, 4, 8, 16, 24, 32) if s <= most])
    model = tiny()[1]
    cfg = CoreConfig(n_blocks=200, block_size=4, max_num_seqs=24, max_model_len=40, window_steps=3, prefix_cache=False)
    prompts = (tiny_prompts(512) * 4)[:n_live]
    prompts, params = [p[:20] for p in prompts], [SamplingParams(temperature=0, max_tokens=9 + i % 4) for i in range(n_live)]
    want = generate(make_core(model, cfg, runner=TorchRunner), prompts, params)
    core = make_core(model, cfg, runner=GraphRunner)
    for _ in range(2): assert generate(core, prompts, params) == want     # captured when idle, replayed the second time
    kv, pool, held = core.runner.kv, core.scheduler.pool, set[int]()
    for layer in range(model.config.n_layers):
        for t in (kv.k[layer], kv.v[layer]):
            t[:] = 7.0
            t[0] = float("nan")
    reserve = pool.reserve
    monkeypatch.setattr(pool, "reserve", lambda s, n: (held.update(b.tolist()) if (b := reserve(s, n)) is not None else None, b)[1])
    core.runner.state.table[:] = 0                     # what padding and ended rows point at
    uses = sum(g.uses for g in core.runner.graphs.values())
    assert generate(core, prompts, params) == want
    assert sum(g.uses for g in core.runner.graphs.values()) > uses and any(k.kind == "decode" and k.size == size for k in core.runner.graphs), list(core.runner.graphs)
    others = [b for b in range(1, 200) if b not in held]
    for layer in range(model.config.n_layers):
        for t in (kv.k[layer], kv.v[layer]): assert bool((t[others] == 7.0).all()) and bool(t[0].isnan().all())


@pytest.mark.parametrize("most", [1, 2, 3, 12, 16, 17, 100, 257, 512])
def test_B22_every_batch_has_a_graph_size(most):
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
    for n in range(1, most + 1):
        s = fit(n, sizes)
        assert s is not None and n <= s <= most and (s < n + 8 or s == most)
    assert fit(most + 1, sizes) is None
    with pytest.raises(ValueError, match="at least 1"): graph_sizes(0)


def test_B22_a_larger_batch_runs_eagerly(caplog):
    "A list of sizes that ends too early: the step runs without a graph, its texts are the same, nothing is raised."
    cfg = CoreConfig(n_blocks=60, block_size=4, max_num_seqs=4, max_model_len=40)
    prompts, params = [p[:12] for p in tiny_prompts(512)[:4]], [SamplingParams(temperature=0, max_tokens=6)] * 4
    want = generate(make_core(tiny()[1], cfg, runner=TorchRunner), prompts, params)
    core = make_core(tiny()[1], cfg, runner=GraphRunner)
    core.runner.sizes = [1, 2]
    with caplog.at_level(logging.WARNING, "llminfer"):
        for _ in range(3): assert generate(core, prompts, params) == want
    assert all(k.size <= 2 for k in core.runner.graphs if k.kind == "decode") and len(caplog.messages) <= 1


# B28: 4-bit layers under torch.compile

@pytest.mark.parametrize("kind", ["nf4", "fp4", "int4", "int8"])
def test_B28_a_4_bit_layer_compiles_whole(kind):
    "One graph, no break, for both dtypes of the input and both a single row and many; quant state is data, and nothing in it changes."
    w = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) / 8
    p = quantise_linear(QuantPlan(kind), w, None, "x")
    torch._dynamo.reset()      # its limit of recompilations counts over tests
    compiled = torch.compile(lambda x: p(x), fullgraph=True, backend="aot_eager")
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
        for rows in (1, 5):
            x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)).to(dtype)
            with torch.inference_mode(): got, want = compiled(x), p(x)
            assert got.dtype == want.dtype == dtype and torch.allclose(got.float(), want.float(), atol=1e-2, rtol=1e-2)


# B35, B33: a middleware between the server and the app

class Logging(BaseHTTPMiddleware):
    async def dispatch(self, request, call_next):
        response = await call_next(request)
        response.headers["x-logged"] = "yes"
        return response


def test_B35_a_middleware_does_not_hide_who_left():
    engine = InferenceEngine(EngineConfig(str(tiny()[0]), device="cpu", dtype="float32", max_model_len=500))
    app = create_openai_app(engine, served_model_name="tiny")
    app.add_middleware(Logging)
    s = Server(app)
    try:
        body, left = {"prompt": "x", "max_tokens": 450, "ignore_eos": True}, lambda: s.engine.stats()["counters"].get("left", 0)
        for stream, number in itertools.product((True, False), range(5)):
            with inject("core.plan", lambda: time.sleep(0.005), times=10**6):      # slow steps: nobody has his answer before he goes
                with socket.create_connection(("127.0.0.1", s.port), timeout=30) as c:
                    c.sendall(http_bytes("/v1/completions", json.dumps(body | {"stream": stream}).encode()))
                    if stream: assert b"x-logged" in c.recv(4096)
                    end = time.monotonic() + 20
                    while not s.engine.stats()["running"] and time.monotonic() < end: time.sleep(0.001)
                s.settle(20)
            assert left() == number + 1 + 5 * (not stream)
        assert s.complete(prompt="x", max_tokens=2)["usage"]["completion_tokens"] == 2
    finally: s.close()


# B37: a server inside a running loop

def test_B37_a_server_starts_and_stops_inside_a_running_loop():
    async def cell() -> list[int]:
        out = []
        for _ in range(2):
            with tiny_http() as s:
                out.append((await asyncio.to_thread(s.complete, prompt="x", max_tokens=3))["usage"]["completion_tokens"])
        return out
    assert asyncio.run(cell()) == [3, 3]
