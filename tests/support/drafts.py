"""Requests that use every feature at once, engines that draft in every way, and the judgement that their texts are those of an engine that never guesses."""
from __future__ import annotations
import random
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Iterator
import torch
from llminfer import assembly
from llminfer.adapters import make_adapter
from llminfer.draft import DeviceDrafts
from llminfer.draft_head import new_head, save_head
from llminfer.loading import load_model, make_tiny
from llminfer.model import Dense
from llminfer.request import GenerationRequest
from llminfer.runner import NoSync, TorchRunner
from llminfer.speculative import DeviceLookup
from support.engines import counters, paged, settle, tiny, tiny_engine

SAYINGS = ["red blue red green ", "the pool of blocks is small and ", "a b a b a c ", "x"]
ALWAYS: dict[str, Any] = dict(speculative_num_assistant_tokens=4, speculative_confidence_threshold=0.0)
SMALL: dict[str, Any] = dict(window_steps=4, max_in_flight=2, block=4, blocks=45)     # too few blocks for everybody: rows are preempted


def crowd(n: int, seed: int, adapters: bool = False) -> list[dict]:
    "Requests that use every feature, with texts that come again: a few ids are far likelier than the rest."
    r, out = random.Random(seed), []
    for i in range(n):
        few = {k: r.choice([20.0, 24.0]) for k in r.sample(range(60, 200), r.choice([2, 3, 5]))}
        kw = dict(prompt=r.choice(SAYINGS) * r.randrange(1, 5), temperature=r.choice([0.0, 0.0, 0.5, 1.0]), seed=i, max_new_tokens=r.choice([1, 2, 5, 17, 30]),
            top_k=r.choice([0, 5, 50]), top_p=r.choice([1.0, 0.9]), min_p=r.choice([0.0, 0.0, 0.05]), logit_bias=few, ignore_eos=r.random() < 0.5, n=r.choice([1, 1, 1, 3]),
            repetition_penalty=r.choice([1.0, 1.0, 1.1]), presence_penalty=r.choice([0.0, 0.0, 0.7]), frequency_penalty=r.choice([0.0, 0.0, 0.4]),
            no_repeat_ngram_size=r.choice([0, 0, 0, 5]), min_tokens=r.choice([0, 0, 6]), logprobs=r.choice([None, None, 0, 3]), prompt_logprobs=r.choice([None, None, None, 1]),
            prefix_key=r.choice([None, None, "salt"]), stop_token_ids=[list(few)[0]] if r.random() < 0.15 else None, bad_words=["a b"] if r.random() < 0.1 else None)
        if r.random() < 0.2: kw["stop_sequences"] = [tiny()[2].token_text(list(few)[-1]) * 2]
        if r.random() < 0.1: kw |= dict(prefix_allowed_tokens_fn=lambda _, ids: [60 + len(ids) % 7, 71], n=1)
        if r.random() < 0.2: kw["speculative_num_assistant_tokens"] = r.choice([0, 1, 3])
        if adapters and r.random() < 0.3: kw["adapter"] = "mine"
        if adapters and r.random() < 0.05: kw |= dict(structured_outputs={"regex": "(yes|no|maybe)( yes| no)*"}, n=1, prefix_allowed_tokens_fn=None, logit_bias=None, bad_words=None)
        out.append(kw)
    return out


@cache
def folders() -> dict[str, Path]:
    "Beside the tiny model: itself, another one that drafts, a head that nobody trained, an adapter."
    folder, model, _ = tiny()
    other = make_tiny(Path(mkdtemp()) / "other", "qwen3", 5)
    dense, words = load_model(folder, torch.float64, "cpu", linear=Dense), torch.arange(40, 220)
    head = save_head(Path(mkdtemp()) / "head", new_head(dense, words) | {"words": words}, "tiny")
    return {"same": folder, "other": other, "head": head, "adapter": make_adapter(Path(mkdtemp()) / "a", model.config, 1)}


METHODS: dict[str, dict[str, Any]] = {"lookup": {}, "self": dict(speculative_method="self", speculative_layers=1), "draft": dict(assistant_model_name="other"),
    "head": dict(assistant_model_name="head")}


def drafting_engine(method: str, adapters: bool = False, **cfg: Any) -> Any:
    "A tiny engine that guesses by `method`; off: it does not."
    how = dict(METHODS.get(method, {}))
    if name := how.get("assistant_model_name"): how["assistant_model_name"] = str(folders()[name])
    e = tiny_engine(**(dict(speculative_num_assistant_tokens=0) if method == "off" else how) | cfg)
    if adapters: paged(e).load_adapter(str(folders()["adapter"]), "mine", activate=False)
    return e


@contextmanager
def on_the_device(yes: bool = True) -> Iterator[None]:
    "Guessers in operations of fixed shapes on a CPU too, and launches that raise if they read the device (joint 21)."
    launch, host = TorchRunner.launch, (assembly.HostLookup, assembly.HostDrafts)
    def watched(self: Any, plan: Any) -> Any:
        with NoSync(): return launch(self, plan)
    TorchRunner.launch = watched  # type: ignore[method-assign]
    if yes: assembly.HostLookup, assembly.HostDrafts = DeviceLookup, DeviceDrafts  # type: ignore[misc, assignment]
    try: yield
    finally:
        TorchRunner.launch = launch  # type: ignore[method-assign]
        assembly.HostLookup, assembly.HostDrafts = host  # type: ignore[misc]


def facts(r: Any) -> tuple:
    "All that must not depend on how an answer was made; log probabilities to nine digits."
    def lp(xs: Any) -> Any: return None if xs is None else [x and (x.token_id, round(x.logprob, 9), x.rank, [(k, round(v, 9)) for k, v in x.top.items()]) for x in xs]
    return (r.error, [(o.token_ids, o.text, o.finish_reason, o.stop_reason, lp(o.logprobs)) for o in r.outputs], lp(r.prompt_logprobs))


def answers(method: str, n: int, seed: int, device: bool = False, **cfg: Any) -> tuple[list[Any], dict[str, int]]:
    "Results and counters of a crowd."
    with on_the_device(device):
        e = drafting_engine(method, adapters=True, **cfg)
        out = e.run_requests([GenerationRequest(**kw) for kw in crowd(n, seed, adapters=True)])
        settle(e)
        c = dict(counters(e))
        e.unload()
    return out, c


ARMS: dict[str, tuple[str, bool, dict[str, Any]]] = {"lookup, host": ("lookup", False, dict(block=4, blocks=60)), "self, host, preempts": ("self", False, dict(block=4, blocks=60)),
    "draft, host, windows of 4": ("draft", False, dict(window_steps=4, max_in_flight=2, block=3, max_num_batched_tokens=80)),
    "head, host, preempts": ("head", False, SMALL), "self, device": ("self", True, SMALL), "draft, device, preempts": ("draft", True, SMALL),
    "head, device, preempts": ("head", True, SMALL), "head, host, as it pays": ("head", False, dict(speculative_confidence_threshold=None, block=4, blocks=60)),
    "self, host, as it pays": ("self", False, dict(speculative_confidence_threshold=None, max_num_seqs=2))}


def compare(n: int, seed: int = 1, arms: Any = ARMS) -> dict[str, dict[str, int]]:
    "Run a crowd under every arm; raises at the first answer that differs from the one without guesses. Counters of each arm."
    want, _ = answers("off", n, seed, prefix_cache=False)
    out = {}
    for name in arms:
        method, device, cfg = ARMS[name]
        got, c = answers(method, n, seed, device, **ALWAYS | cfg)
        for kw, r, w in zip(crowd(n, seed, True), got, want): assert facts(r) == facts(w), (name, kw, facts(r), facts(w))
        assert not c.get("launch_errors") and c["draft_tokens"] and sum(r.stats.accepted_tokens for r in got) <= c.get("accepted_tokens", 0)
        for kw, r in zip(crowd(n, seed, True), got):
            if kw.get("speculative_num_assistant_tokens") == 0 or kw.get("prefix_allowed_tokens_fn") or kw.get("structured_outputs"): assert not r.stats.draft_tokens
        out[name] = {k: c.get(k, 0) for k in ("steps", "draft_tokens", "accepted_tokens", "preemptions")} | {"requests": n}
    return out
