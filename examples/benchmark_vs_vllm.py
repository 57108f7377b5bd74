"""Our engine against vLLM (or any other backend): a process each, in turns, the same prompts, tokens judged before speed is shown.

    python examples/benchmark_vs_vllm.py --model Qwen/Qwen2.5-1.5B-Instruct --batch-sizes 1,8,32 --outdir benchmarks/vllm_compare

A backend that is not installed, or fails, has its reason in the table and in the files; the others are measured all the same.
"""
from __future__ import annotations
import argparse, os, sys
from pathlib import Path
from llminfer.artifacts import save_all
from llminfer.benchmark import BackendComparison, paired_ratio, save_comparison_csv, save_comparison_json
from llminfer.config import ConfigError


def arguments() -> argparse.Namespace:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    yes_no = argparse.BooleanOptionalAction
    ap.add_argument("--model", default="demo")
    ap.add_argument("--backends", default="paged,vllm")
    ap.add_argument("--quant", default="none", choices=("none", "int8", "nf4", "fp4"))
    ap.add_argument("--batch-sizes", default="1,2,4,8")
    ap.add_argument("--runs", type=int, default=10)
    ap.add_argument("--warmup", type=int, default=1)
    ap.add_argument("--max-new-tokens", type=int, default=128)
    ap.add_argument("--prompt-type", default="medium", choices=("short", "medium", "long", "mixed"))
    ap.add_argument("--continuous", action=yes_no, default=False)
    ap.add_argument("--paged-kv", action=yes_no, default=True)
    ap.add_argument("--page-size-tokens", type=int, default=16)
    ap.add_argument("--tp-size", type=int, default=1)
    ap.add_argument("--pp-size", type=int, default=1)
    ap.add_argument("--compile-fullgraph", action=yes_no, default=False)
    ap.add_argument("--compile-cudagraphs", action=yes_no, default=True)
    ap.add_argument("--spec-num-assistant-tokens", type=int)
    ap.add_argument("--spec-confidence-threshold", type=float)
    ap.add_argument("--revision")
    ap.add_argument("--hf-token", default=os.environ.get("HF_TOKEN"), help="better in the environment: arguments show in ps")
    ap.add_argument("--local-files-only", action="store_true")
    ap.add_argument("--cache-dir")
    ap.add_argument("--trust-remote-code", action=yes_no, default=False)
    ap.add_argument("--device", default="auto")
    ap.add_argument("--dtype", default="auto")
    ap.add_argument("--max-model-len", type=int)
    ap.add_argument("--outdir", type=Path, default=Path("benchmarks/vllm_compare"))
    return ap.parse_args()


def main() -> int:
    a = arguments()
    try:
        c = BackendComparison(a.model, a.backends.split(","), a.quant, hf_revision=a.revision, hf_token=a.hf_token or None,
            hf_local_files_only=a.local_files_only, hf_trust_remote_code=a.trust_remote_code, hf_cache_dir=a.cache_dir,
            paged_kv=a.paged_kv, page_size_tokens=a.page_size_tokens, tensor_parallel_size=a.tp_size, pipeline_parallel_size=a.pp_size,
            compile_fullgraph=a.compile_fullgraph, compile_cudagraphs=a.compile_cudagraphs,
            speculative_num_assistant_tokens=a.spec_num_assistant_tokens, speculative_confidence_threshold=a.spec_confidence_threshold,
            device=a.device, dtype=a.dtype, max_model_len=a.max_model_len)
        sizes = [int(x) for x in a.batch_sizes.split(",")]
        results = c.run(sizes, a.runs, a.max_new_tokens, a.continuous, warmup_runs=a.warmup, prompt_type=a.prompt_type)
    except (ConfigError, ValueError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    c.print_table(results)
    first = results[0]
    for other in results[1:]:
        for b in first.batch_sizes:
            x = paired_ratio(first, other, b)
            if x == x: print(f"batch {b}: {first.backend_name} is {x:.2f} times as fast as {other.backend_name} (median of pairs)")
    out, measured = a.outdir, any(r.metrics_by_batch for r in results)
    jobs = [(out / "comparison.json", lambda p: save_comparison_json(results, p)),
        (out / "comparison.csv", lambda p: save_comparison_csv(results, p))]
    if measured: jobs += [(out / "comparison.png", lambda p: c.plot(results, p)), (out, lambda p: c.plot_suite(results, p))]
    written, problems = save_all(jobs)
    for p in written: print(f"saved {p}")
    for x in problems: print(f"warning: {x}", file=sys.stderr)
    return 0 if measured and not problems else 1


if __name__ == "__main__": sys.exit(main())
