"""Engines for the tests of the server: no model, steps as long as a test wants, and faults that a prompt can pull."""
from __future__ import annotations
import asyncio, os, signal, time
from contextlib import asynccontextmanager
from typing import Any, Callable
import torch
from llminfer.config import EngineConfig
from llminfer.engine import InferenceEngine
from llminfer.engine_handle import PacedRunner, scripted_engine
from llminfer.request import GenerationRequest
from llminfer.serving import AsyncEngine, ServingLimits
from support.engines import tiny

KILL, EXIT, RAISE, STICKY = 190, 191, 192, 193   # first ids of prompts: kill the process, end the engine's thread, fail a step, break the device


class FaultyRunner(PacedRunner):
    "Does what the first id of a prompt says."
    def launch(self, plan: Any) -> Any:
        for c in plan.prefill:
            if c.ids[0] == KILL: os.kill(os.getpid(), signal.SIGKILL)
            if c.ids[0] == EXIT: raise SystemExit(3)
            if c.ids[0] == RAISE: raise RuntimeError("this step fails")
            if c.ids[0] == STICKY: raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        return super().launch(plan)


def scripted(step_s: float = 0.0, runner: type[PacedRunner] = FaultyRunner, **settings: Any) -> InferenceEngine:
    "A loaded engine without a model."
    engine = scripted_engine(tiny()[2], step_s, **{"max_num_seqs": 4, "max_model_len": 2048} | settings)
    engine.backend.unload()
    engine.backend.runner = runner   # type: ignore[attr-defined]
    return engine.load()


def make_scripted(cfg: EngineConfig) -> InferenceEngine:
    "For a child process; `model_name` says how long a step is."
    return scripted(float(cfg.model_name), max_num_seqs=cfg.max_num_seqs or 4, max_model_len=cfg.max_model_len or 2048, trace=cfg.trace)


def make_nothing(cfg: EngineConfig) -> InferenceEngine: os._exit(7)


def request(first: int = 5, n_tokens: int = 20, n_prompt: int = 4, **kw: Any) -> GenerationRequest:
    return GenerationRequest(prompt_token_ids=[first, *range(20, 19 + n_prompt)], max_new_tokens=n_tokens, **{"temperature": 0.0, "stream": True} | kw)


async def read(engine: AsyncEngine, r: GenerationRequest, **kw: Any) -> list[int]:
    "Ids of a stream, all of them."
    async with await engine.open(r, **kw) as s: return [i async for c in s for i in c.token_ids]


async def until(what: Callable[[], Any], seconds: float = 10.0) -> None:
    "Wait for something to become true."
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, f"still not so after {seconds} s"
        await asyncio.sleep(0.01)


def blocks_held(engine: AsyncEngine) -> int: return engine.stats()["kv_blocks"]["used"]


@asynccontextmanager
async def serving(engine: Any, **limits: Any):
    "A started `AsyncEngine`; at the end nothing may be left in it."
    a = AsyncEngine(engine, ServingLimits(**limits))
    await a.start()
    try:
        yield a
        await until(lambda: not a.stats()["open"] and not blocks_held(a))
        assert (a.n_given, a.queued_tokens, a.n_entering, len(a.running), len(a.queue)) == (0, 0, 0, 0, 0)
    finally:
        await a.stop(0)
        if isinstance(engine, InferenceEngine): engine.unload()
