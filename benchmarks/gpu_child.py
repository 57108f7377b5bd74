"""One arm of the GPU comparison in a process of its own: JSON lines in on stdin, JSON lines out on stdout; what libraries print goes to stderr.

    python3 benchmarks/gpu_child.py ours|vllm|hf|judge|ranks

Requests: {"op": "load", "model": folder, ...}, {"op": "run", "prompts": ids, "n_new": n}, {"op": "idle"}, {"op": "judge", ...}, {"op": "quit"}.
Replies carry "ok"; a failed request is {"ok": false, "error": one line} and the process goes on.
"""
from __future__ import annotations
import gc, importlib, json, os, sys, time, traceback
from dataclasses import fields
from typing import Any

GRAPHS, FUSED = "llminfer.cuda_graphs:GraphRunner", "llminfer.kernels:FusedProgram"


def named(where: str) -> Any:
    "The object at `module:name`; `LookupError` says what is missing."
    module, name = where.split(":")
    try: return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as e: raise LookupError(f"{where} is not available: {e}") from None


def fastest(model: Any) -> dict[str, str]:
    "The runner and program that the engine takes for this model on its device by default."
    from llminfer.assembly import choose_parts
    from llminfer.config import EngineConfig
    parts = choose_parts(EngineConfig(), model)
    print(parts.reasons, file=sys.stderr)
    return {k: f"{c.__module__}:{c.__qualname__}" for k, c in (("runner", parts.runner), ("program", parts.program))}


def build_core(model: Any, parts: dict[str, str] | None = None, **settings: Any) -> Any:
    "A core of named parts (None: the fastest there are, {}: the plain ones); `LookupError` for an unknown part or setting."
    from llminfer.core import CoreConfig, make_core
    if unknown := set(settings) - {f.name for f in fields(CoreConfig)}: raise LookupError(f"CoreConfig has no {', '.join(sorted(unknown))}")
    parts = fastest(model) if parts is None else parts
    return make_core(model, CoreConfig(**settings), **{k: named(v) for k, v in parts.items()})


def path_of(core: Any) -> dict[str, Any]:
    "What really ran: classes, counters, and the runner's own account if it gives one."
    r = core.runner
    out = {"runner": type(r).__name__, "program": getattr(r.program, "name", type(r.program).__name__), "linear": core.runner.model.linear_kind,
           "counters": dict(core.trace.counters) | dict(getattr(getattr(r, "trace", None), "counters", {}))}
    if hasattr(r, "graphs"): out |= {"graphs": len(r.graphs), "graphs_failed": len(r.failed), "capture_s": round(r.capture_s, 2)}
    for owner in (core, r, r.program):
        if callable(info := getattr(owner, "info", None)): out["info"] = out.get("info", {}) | json.loads(json.dumps(info(), default=str))
    return out


class Ours:
    "llminfer: floors 04-15 without text, servers or threads."
    def load(self, model: str, device: str, dtype: str, rows: int, n_blocks: int, max_model_len: int, budget: int, extra: dict[str, Any]) -> dict[str, Any]:
        import torch
        from llminfer.loading import load_model
        loaded = load_model(model, getattr(torch, dtype), device)
        ahead = {"window_steps": 16, "by_time": True, "max_in_flight": 2, "follow": True} if device == "cuda" else {}   # as the engine's own defaults
        parts = extra.pop("parts", None)       # {"runner": "module:name", "program": ...}
        self.core = build_core(loaded, parts, **dict(n_blocks=n_blocks, max_num_seqs=rows, max_model_len=max_model_len, max_num_batched_tokens=budget,
            prefix_cache=False) | ahead | extra)
        import llminfer
        return {"version": llminfer.__version__}

    def run(self, prompts: list[list[int]], n_new: int, sampled: bool = False) -> tuple[float, list[list[int]]]:
        "`sampled`: temperature, top-k, top-p and all three penalties instead of the likeliest token."
        from llminfer.core import generate
        from llminfer.request import SamplingParams
        how = dict(temperature=0.8, top_k=50, top_p=0.9, seed=1, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.2) if sampled else dict(temperature=0)
        t = time.perf_counter()
        out = generate(self.core, prompts, SamplingParams(max_tokens=n_new, **how))
        return time.perf_counter() - t, out

    def idle(self) -> dict[str, Any]:
        "What the engine does between requests: capture the steps that it missed."
        pending = bool(getattr(self.core.runner, "wants_idle", False))
        if pending: self.core.runner.idle()
        return {"pending": pending, "path": path_of(self.core)}


class Vllm:
    "vLLM at its best for this load: asynchronous, full graphs at the measured sizes and around, the same KV bytes as ours."
    def load(self, model: str, device: str, dtype: str, rows: int, kv_bytes: int, gpu_share: float, max_model_len: int, budget: int, sizes: list[int],
             extra: dict[str, Any]) -> dict[str, Any]:
        os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1"}
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")   # greedy: not used, and FlashInfer is not packed
        from vllm import LLM, __version__
        graphs = sorted({1, 2, 4, *range(8, 129, 8), *range(144, rows + 1, 16), 512, *sizes})
        compiled = {"compile_sizes": sizes} if extra.pop("compile_sizes", False) else {}     # Inductor makes code for the measured batches
        self.llm = LLM(model=model, **dict(skip_tokenizer_init=True, dtype=dtype, enable_prefix_caching=False, max_model_len=max_model_len, max_num_seqs=rows,
            max_num_batched_tokens=budget, kv_cache_memory_bytes=kv_bytes, gpu_memory_utilization=gpu_share, disable_log_stats=True,
            compilation_config={"cudagraph_capture_sizes": graphs} | compiled) | extra)
        return {"version": __version__, "cudagraph_capture_sizes": graphs}

    def run(self, prompts: list[list[int]], n_new: int) -> tuple[float, list[list[int]]]:
        from vllm import SamplingParams
        params = SamplingParams(temperature=0, max_tokens=n_new, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": p} for p in prompts]
        t = time.perf_counter()
        out = self.llm.generate(inputs, params, use_tqdm=False)
        t = time.perf_counter() - t
        return t, [list(o.outputs[0].token_ids) for o in out]

    def idle(self) -> dict[str, Any]: return {"pending": False}


class Hf:
    "transformers `generate`: one static batch of equal lengths."
    def load(self, model: str, device: str, dtype: str, extra: dict[str, Any]) -> dict[str, Any]:
        import torch, transformers
        self.torch = torch
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype), **extra).to(device).eval()
        return {"version": transformers.__version__}

    def run(self, prompts: list[list[int]], n_new: int) -> tuple[float, list[list[int]]]:
        torch = self.torch
        t = time.perf_counter()
        with torch.inference_mode():
            ids = torch.tensor(prompts, device=self.model.device)
            out = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n_new, do_sample=False,
                                      eos_token_id=self.model.config.vocab_size + 7, pad_token_id=0)[:, ids.shape[1]:].tolist()
        return time.perf_counter() - t, out

    def idle(self) -> dict[str, Any]: return {"pending": False}


class Ranks:
    "The whole paged engine on `tp` GPUs, by its own defaults."
    def load(self, model: str, device: str, dtype: str, rows: int, n_blocks: int, max_model_len: int, budget: int, tp: int) -> dict[str, Any]:
        from llminfer.config import CacheConfig, EngineConfig
        from llminfer.ranks import RankedEngine
        cache = CacheConfig(num_blocks=n_blocks, enable_prefix_cache=False)
        self.engine = RankedEngine(EngineConfig(model_name=model, device=device, dtype=dtype, tensor_parallel_size=tp, max_num_seqs=rows, max_model_len=max_model_len,
            max_num_batched_tokens=budget, cache=cache).validate())
        self.engine.load()
        return {"info": self.facts()}

    def facts(self) -> dict[str, Any]: return {k: v for k, v in self.engine.info().items() if k in ("tensor_parallel", "kernels", "steps", "attention", "speculation", "counters", "kv_bytes")}

    def run(self, prompts: list[list[int]], n_new: int) -> tuple[float, list[list[int]]]:
        from llminfer.request import GenerationRequest
        requests = [GenerationRequest(prompt_token_ids=p, max_new_tokens=n_new, temperature=0.0, ignore_eos=True) for p in prompts]
        t = time.perf_counter()
        out = self.engine.generate(requests)
        if bad := [r.error for r in out if r.error]: raise RuntimeError(bad[0])
        return time.perf_counter() - t, [r.token_ids for r in out]

    def idle(self) -> dict[str, Any]:
        "Captures happen by themselves, before the next launch."
        return {"pending": bool(self.engine.loop.core.runner.wants_idle), "path": self.facts()}


class Judge:
    "The gate: an oracle in higher precision, and transformers in the arms' precision as the measure of what rounding explains."
    def load(self, model: str, device: str, dtype: str, oracle: str) -> dict[str, Any]:
        import torch
        from llminfer.loading import load_model
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        self.torch, self.device = torch, device
        self.oracle, self.hf = load_model(model, getattr(torch, oracle), device), Hf()
        self.hf.load(model, device, dtype, {})
        return {}

    def low(self, ids: list[int]) -> Any: return self.hf.model(self.torch.tensor([ids], device=self.device)).logits[0]

    def judge(self, cases: dict[str, dict[str, Any]], n_reference: int) -> dict[str, Any]:
        "`cases`: arm and batch -> prompts and outputs; returns a verdict for each, and the reference's errors."
        from llminfer.benchmark import judge_low_precision, reference_errors
        with self.torch.inference_mode():
            pairs = [pair for c in cases.values() for pair in zip(c["prompts"], c["outputs"])]
            pairs = pairs[::max(len(pairs) // n_reference, 1)][:n_reference]
            ref = reference_errors(self.oracle.logits, self.low, pairs)
            verdicts = {k: judge_low_precision(self.oracle.logits, ref, c["prompts"], c["outputs"]) for k, c in cases.items()}
        return {"reference": {"e": ref.e, "not_best": ref.not_best, "n_requests": len(pairs)},
                "verdicts": {k: v.to_dict() | {"explained": v.explained[:2], "n_explained": len(v.explained)} for k, v in verdicts.items()}}


ARMS: dict[str, type] = {"ours": Ours, "vllm": Vllm, "hf": Hf, "judge": Judge, "ranks": Ranks}


def serve(arm: Any, replies: Any) -> None:
    "Answer requests until `quit` or the end of the input."
    for line in sys.stdin:
        request = json.loads(line)
        op = request.pop("op")
        if op == "quit": break
        try:
            result = getattr(arm, op)(**request)
            if op == "run": result = {"seconds": result[0], "tokens": [list(map(int, t)) for t in result[1]]}
            reply = {"ok": True} | result
            if op == "load": gc.collect(), gc.freeze()            # collections during timed runs look at new objects only, in every arm
        except BaseException as e:
            traceback.print_exc()
            reply = {"ok": False, "error": f"{type(e).__name__}: {str(e).strip().splitlines()[0] if str(e).strip() else ''}"[:400]}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)                              # libraries and their child processes print to the log
    serve(ARMS[sys.argv[1]](), replies)


if __name__ == "__main__": main()
