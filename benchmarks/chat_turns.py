"""A conversation of eight turns with the demo model, prefix cache on and off: hits on decoded blocks, prefill saved, time to the first token.

    OMP_NUM_THREADS=2 python benchmarks/chat_turns.py [--tokens 32] [--answers 64] [--out benchmarks/records/chat_turns.json]

Greedy; ids of earlier turns are kept (`llminfer.chat`), so the decoded blocks of an answer are found by the next turn. `spelling`
says how often an answer that is encoded again, as a server's client makes it, has other ids than were written: there the hits end.
"""
import argparse, json, os, platform, sys, time
from datetime import UTC, datetime
from pathlib import Path
import psutil
import torch
import llminfer
from llminfer.artifacts import cpu_name
from llminfer.chat import Chat
from llminfer.config import CacheConfig, EngineConfig
from llminfer.engine import InferenceEngine
from llminfer.request import GenerationRequest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from support.prompts import PROMPTS

SYSTEM = "You are a friendly teacher. Answer in a few plain sentences, and end with one thing that is worth a closer look."
QUESTIONS = ("What is a prime number?", "Is one a prime number?", "How many of them are there?", "Who found that out?",
             "Can you give me the idea of the proof?", "What are they used for today?", "Are there still open questions about them?",
             "Which of all this should I tell a child of ten?")


def engine(prefix_cache):
    return InferenceEngine(EngineConfig("demo", device="cpu", seed=0, max_model_len=2048, cache=CacheConfig(enable_prefix_cache=prefix_cache))).load()


def conversation(prefix_cache, n_new):
    "One row a turn."
    with engine(prefix_cache) as e:
        e.warmup()
        chat, rows = Chat(e, SYSTEM, temperature=0.0, max_new_tokens=n_new), []
        for q in QUESTIONS:
            start, first = time.perf_counter(), 0.0
            for _ in chat.ask(q): first = first or time.perf_counter()
            t = chat.turns[-1]
            rows.append({"prompt_tokens": t.prompt_tokens, "taken_over": t.taken_over, "cached_tokens": t.cached_tokens, "generated_tokens": t.generated_tokens,
                         "ttft_ms": round((first - start) * 1e3, 1), "finish_reason": t.finish_reason, "token_ids": list(t.token_ids)})
    return rows


def spelling(n_answers, n_new):
    "How many answers come back with other ids when their text is encoded again."
    rows = []
    with engine(True) as e:
        tok = e.backend.tokenizer
        prompts = [e.encode_chat([{"role": "user", "content": p}]) for p in PROMPTS[:n_answers]]
        for temperature in (0.0, 1.0):
            results = e.run_requests([GenerationRequest(prompt_token_ids=p, max_new_tokens=n_new, temperature=temperature, top_p=1.0, top_k=0, seed=i)
                                      for i, p in enumerate(prompts)])
            bodies = [[i for i in r.token_ids if i not in tok.special_ids] for r in results]
            other = sum(tok.encode(tok.decode(b), add_special_tokens=False) != b for b in bodies)
            rows.append({"temperature": temperature, "answers": len(results), "tokens": n_new, "respelled": other})
    return rows


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--tokens", type=int, default=32)
    ap.add_argument("--answers", type=int, default=64)
    ap.add_argument("--out", default=str(ROOT / "benchmarks/records/chat_turns.json"))
    a = ap.parse_args()
    on, off = conversation(True, a.tokens), conversation(False, a.tokens)
    equal = [t["token_ids"] for t in on] == [t["token_ids"] for t in off]
    prompt, cached = (sum(t[k] for t in on) for k in ("prompt_tokens", "cached_tokens"))
    decoded_hits = sum(max(0, t["cached_tokens"] - before["prompt_tokens"]) for before, t in zip(on, on[1:]))
    for rows in (on, off):
        for t in rows: del t["token_ids"]
    record = {"kind": "chat_turns", "model": "demo (SmolLM2-135M-Instruct, GGUF dequantised to fp32)", "new_tokens": a.tokens, "environment": environment(),
              "tokens_equal": equal, "prompt_tokens": prompt, "cached_tokens": cached, "prefill_saved": round(cached / prompt, 4),
              "cached_tokens_of_answers": decoded_hits, "ttft_ratio_last": round(off[-1]["ttft_ms"] / on[-1]["ttft_ms"], 2),
              "cache_on": on, "cache_off": off, "spelling": spelling(a.answers, a.tokens)}
    Path(a.out).write_text(json.dumps(record, indent=1) + "\n")
    for n, (x, y) in enumerate(zip(on, off), 1):
        print(f"turn {n}: prompt {x['prompt_tokens']:4}  cached {x['cached_tokens']:4}  ttft {x['ttft_ms']:7.1f} ms, without the cache {y['ttft_ms']:7.1f} ms")
    print(f"tokens equal: {equal}; prefill saved: {cached} of {prompt} tokens ({cached / prompt:.0%}), {decoded_hits} of them written by the model")
    for s in record["spelling"]: print(f"temperature {s['temperature']}: {s['respelled']} of {s['answers']} answers come back with other ids")
    if not equal or not decoded_hits: raise SystemExit("tokens differ, or no decoded block was found")


def environment():
    return {"cpu": cpu_name(), "cores": psutil.cpu_count(), "threads": torch.get_num_threads(), "load": round(os.getloadavg()[0], 1), "python": platform.python_version(),
            "torch": torch.__version__, "llminfer": llminfer.__version__, "date": datetime.now(UTC).isoformat(timespec="seconds")}


if __name__ == "__main__": main()
