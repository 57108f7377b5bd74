"""Engines around models that are in memory: tiny random ones, and forced ones whose text is a script."""
from __future__ import annotations
import threading, time
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Sequence
import pytest
import torch
from llminfer.backends import GenerationError, PagedEngine
from llminfer.config import CacheConfig, EngineConfig
from llminfer.engine import InferenceEngine
from llminfer.loading import load_model, make_tiny, open_checkpoint
from llminfer.model import CausalModel, ForcedModel
from llminfer.tokenization import Tokenizer, load_tokenizer

MADE: list[InferenceEngine] = []   # by `engine_around` in this test
CACHE = {"block": "page_size_tokens", "blocks": "num_blocks", "prefix_cache": "enable_prefix_cache", "paged": "enable_paged_kv", "cpu_kv_bytes": "cpu_kv_bytes"}


@cache
def tiny(family: str = "llama", dtype: torch.dtype = torch.float64) -> tuple[Path, Any, Tokenizer]:
    "Folder, model and tokenizer of a tiny random model; one for all tests of a process."
    folder = make_tiny(Path(mkdtemp()) / family, family, 0)
    ckpt = open_checkpoint(folder)
    return folder, load_model(ckpt, dtype, "cpu"), load_tokenizer(ckpt.tokenizer)


def engine_around(model: CausalModel, tok: Tokenizer, **cfg: Any) -> InferenceEngine:
    "An engine; `block`, `blocks`, `prefix_cache` and `paged` are settings of the cache."
    cache_cfg = CacheConfig(**{CACHE[k]: cfg.pop(k) for k in list(cfg) if k in CACHE})
    e = InferenceEngine(EngineConfig(cache=cache_cfg, **{"max_model_len": 128, "seed": 0} | cfg))
    paged(e).start(model, tok)
    MADE.append(e)
    return e


def tiny_engine(**cfg: Any) -> InferenceEngine:
    _, model, tok = tiny()
    return engine_around(model, tok, **cfg)


def forced_engine(answers: Sequence[Any], n_prompt: int = 3, forced: dict[str, Any] | None = None,
                  scripts: dict[int, list[int]] | None = None, **cfg: Any) -> InferenceEngine:
    """An engine that says answers[i] (a text, or ids; then EOS) to `forced_prompt(i)`; other prompts get what the forced model's
    own rule says. It reads and checks the KV that it wrote, so a wrong page is a NaN."""
    tok = tiny()[2]
    scripts = scripts or {300 + i: forced_prompt(i, n_prompt) + ids_of(a) + [tok.eos_token_ids[0]] for i, a in enumerate(answers)}
    model = ForcedModel(scripts, vocab_size=tok.vocab_size, **{"eos_token_ids": tok.eos_token_ids[:1]} | (forced or {}))
    return engine_around(model, tok, **cfg)


def forced_prompt(i: int, n: int = 3) -> list[int]: return [300 + i, *(20 + j % 200 for j in range(n - 1))]


def ids_of(text: Any) -> list[int]: return tiny()[2].encode(text, add_special_tokens=False) if isinstance(text, str) else list(text)


def pieces(*texts: str) -> list[int]:
    "Ids of texts that are encoded apart, so that no token crosses their borders."
    return [i for t in texts for i in ids_of(t)]


def oracle(ids: Sequence[int], n: int) -> list[int]:
    "Greedy continuation of the tiny model by whole-sequence recomputation."
    out, model = list(ids), tiny()[1]
    for _ in range(n): out.append(int(model.logits(torch.tensor(out))[-1].argmax()))
    return out[len(ids):]


def paged(e: InferenceEngine) -> PagedEngine:
    assert isinstance(e.backend, PagedEngine)
    return e.backend


def counters(e: InferenceEngine) -> dict[str, int]: return paged(e).trace.counters


def pool_of(e: InferenceEngine) -> Any:
    loop = paged(e).loop
    assert loop is not None
    return loop.core.scheduler.pool


def settle(e: InferenceEngine, seconds: float = 5.0) -> None:
    "Wait until nothing runs; then no block may be held, and the pool's books must balance."
    loop = paged(e).loop
    assert loop is not None
    end = time.monotonic() + seconds
    while (loop.inbox or loop.core.has_work) and time.monotonic() < end: time.sleep(0.001)
    pool = loop.core.scheduler.pool
    assert not loop.handles and not loop.core.has_work
    pool.check()
    assert pool.n_held == pool.n_draining == 0 and not pool.stats()["sequences"]


def engine_threads() -> int: return sum(t.name == "llminfer-engine" for t in threading.enumerate())


@contextmanager
def all_closed():
    "Unload every engine that `engine_around` made inside; then no engine thread may be alive that was not before."
    before = engine_threads()
    yield
    while MADE: MADE.pop().unload()
    end = time.monotonic() + 2
    while engine_threads() > before and time.monotonic() < end: time.sleep(0.005)
    assert engine_threads() == before


def drain(s):
    "(text, error) of the rest of a stream."
    text = ""
    try:
        for c in s: text += c.token
    except GenerationError as e: return text, str(e)
    return text, None


GREEDY = dict(temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def clean():
    "A test that leaves an engine thread behind fails."
    with all_closed(): yield
