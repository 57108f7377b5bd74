"""Controls of decoding, what a request may carry, adapters and drafts if they are given, and artifacts of a benchmark.

    python examples/advanced_features.py [--model demo] [--adapter PATH] [--assistant-model NAME] [--outdir DIR]
"""
from __future__ import annotations
import argparse, sys
from pathlib import Path
from typing import Any
from llminfer import EngineConfig, GenerationRequest, InferenceEngine
from llminfer.benchmark import Benchmarker

CONTROLS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded: the same text every time": {"temperature": 0.9, "seed": 7},
    "no pair of tokens twice": {"temperature": 0.0, "no_repeat_ngram_size": 2},
    "stop at a comma": {"temperature": 0.0, "stop_sequences": [","]},
    "a word that may not appear": {"temperature": 0.0, "bad_words": ["time"]},
    "penalties": {"temperature": 0.8, "seed": 1, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "to the full length": {"temperature": 0.0, "ignore_eos": True},
}


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--model", default="demo")
    ap.add_argument("--device", default="auto")
    ap.add_argument("--max-new-tokens", type=int, default=20)
    ap.add_argument("--adapter", help="a LoRA adapter: folder or hub id")
    ap.add_argument("--assistant-model", help="a small model that drafts")
    ap.add_argument("--outdir", type=Path, help="measure, and write benchmark.json and benchmark.csv there")
    a = ap.parse_args()
    with InferenceEngine(EngineConfig(a.model, device=a.device, assistant_model_name=a.assistant_model)) as engine:
        for name, kw in CONTROLS.items():
            r = engine.run("Once upon a time", max_new_tokens=a.max_new_tokens, **kw)
            print(f"{name}: {r.generated_text.strip()[:70]!r} ({r.finish_reason}, {r.stats.generated_tokens} tokens)")
        requests = [GenerationRequest("1, 2, 3,", max_new_tokens=4, temperature=0.0),
            GenerationRequest("Once upon", max_new_tokens=12, seed=3),
            GenerationRequest("The sea", max_new_tokens=6, n=2, seed=5, logprobs=2)]
        print("\nrequests that share steps, each with its own limits:")
        for x in engine.run_requests(requests): print(f"  {x.stats.generated_tokens} tokens: {[o.text[:30] for o in x.outputs]}")
        if a.adapter:
            engine.load_adapter(a.adapter, "mine")
            engine.set_adapter("mine")
            text = engine.run("Hello", max_new_tokens=a.max_new_tokens, temperature=0).generated_text
            print(f"\nadapters {engine.list_adapters()}: {text}")
            engine.unload_adapter("mine")
        shown = ("total_hits", "total_misses", "prefix_hit_rate", "total_pages")
        print("\ncache:", {k: v for k, v in engine.cache_stats().items() if k in shown})
        if a.outdir:
            result = Benchmarker(engine).run([1, 2], num_runs=2, warmup_runs=1, prompt_type="short", max_new_tokens=a.max_new_tokens)
            result.save_json(a.outdir / "benchmark.json")
            result.save_csv(a.outdir / "benchmark.csv")
            checks = [m.token_check["status"] for m in result.metrics_by_batch.values()]
            print(f"\nsaved {a.outdir / 'benchmark.json'}, its tokens: {checks}")
    return 0


if __name__ == "__main__": sys.exit(main())
