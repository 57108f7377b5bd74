"""A question is answered through the paged engine, beside three others, while the pool of KV blocks is drawn: `make demo`."""
from __future__ import annotations
import queue, shutil, sys, time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from llminfer import EngineConfig, GenerationRequest, GenerationResult, InferenceEngine
from llminfer.config import CacheConfig

SYSTEM = ("You are a careful assistant. Answer the question in two or three short sentences of plain English. Say first what is "
          "asked for, then one fact about it that a curious reader would like to know. If you do not know the answer, say so.")
QUESTIONS = ("What does a bee do all day?", "What is the capital of France?", "What is a prime number?", "How do birds fly?")
COLOURS = {"A": "#E69F00", "B": "#56B4E9", "C": "#009E73", "D": "#CC79A7", "=": "bold reverse", "c": "cyan", ".": "dim", "~": "dim", "#": "dim"}
WIDTH = min(shutil.get_terminal_size((88, 24)).columns, 96)
News = queue.SimpleQueue[tuple[int, Any, str]]   # question, chunk, drawing of the pool

def coloured(drawing: str) -> Text:
    "Give each sequence of a drawing its colour, in the map of blocks and before its table."
    out = Text()
    for line in drawing.splitlines():
        in_map, is_table = line[:6].strip().isdigit(), line[:5].isspace() and line[5:6].isupper()
        for i, ch in enumerate(line): out.append(ch, COLOURS.get(ch, "") if in_map and i > 6 or is_table and i == 5 else "")
        out.append("\n")
    return Text("\n").join(out.split("\n", allow_blank=False))

def box(content: Text, title: str) -> Panel: return Panel(content, title=Text(title), title_align="left", width=WIDTH)

def ask(engine: InferenceEngine, who: int, news: News) -> Any:
    "Queue a question. Each piece of its answer comes with a drawing of the pool, made in the engine thread, which owns the pool."
    from llminfer.kv_cache import draw_text
    backend: Any = engine.backend
    labels = {i: f"{q}  blocks" for i, q in enumerate(QUESTIONS)}    # sequences are numbered in the order of their arrival
    def notify(chunk: Any) -> None: news.put((who, chunk, draw_text(backend.loop.core.scheduler.pool, labels, width=48)))
    ids = engine.encode_chat([{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTIONS[who]}])
    return backend.submit(GenerationRequest(prompt_token_ids=ids, max_new_tokens=64, temperature=0.0, stream=True), notify=notify)

def numbers(results: list[GenerationResult], seconds: float) -> Group:
    "What every request cost, and all of them together."
    t = Table("", "prompt", "from cache", "new tokens", "TTFT", "latency", "tok/s", "ended by", box=None, padding=(0, 2, 0, 0), header_style="bold")
    for letter, r in zip("ABCD", results):
        s = r.stats
        t.add_row(letter, str(s.prompt_tokens), str(s.cached_tokens), str(s.generated_tokens), f"{s.time_to_first_token_ms:.0f} ms",
            f"{s.total_latency_ms:.0f} ms", f"{s.throughput_tokens_per_sec:.1f}", str(r.finish_reason))
    n, first = sum(r.stats.generated_tokens for r in results), results[0].stats
    return Group(t, Text(f"\ntokens={n}  latency={seconds * 1e3:.0f}ms  ttft={first.time_to_first_token_ms:.0f}ms  tok/s={n / seconds:.1f}  (all four together)"))

def watch(console: Console, engine: InferenceEngine) -> tuple[list[Any], str]:
    "Ask, and show the answer to the first question and the pool while all four run. Returns (handles, answer)."
    news: News = queue.SimpleQueue()
    handles, answer, open_, n, seen = [ask(engine, 0, news)], "", len(QUESTIONS), [0] * len(QUESTIONS), set[str]()
    live = Live(console=console, refresh_per_second=8) if console.is_terminal else None
    def moment(title: str, drawing: str) -> None:
        if title not in seen: console.print(box(coloured(drawing), title))
        seen.add(title)
    with live or nullcontext():
        while open_:
            who, chunk, drawing = news.get()
            if chunk.error: raise SystemExit(f"error: {chunk.error}")
            open_, n[who], answer = open_ - chunk.is_final, n[who] + len(chunk.token_ids), answer + chunk.token * (who == 0)
            if len(handles) == 1:
                moment("A's prompt is in", drawing)
                handles += [ask(engine, i, news) for i in range(1, len(QUESTIONS))]
            elif all(n): moment("all four run: the system prompt is held once (=)", drawing)
            if n[0] == 40: moment("B has ended: its blocks are free, or cached (c) for the next one who begins alike", drawing)
            if not open_: moment("all have ended: nothing is held", drawing)
            if live: live.update(Group(box(Text(answer.strip() or " "), f"A: {QUESTIONS[0]}"), box(coloured(drawing), "KV pool now")) if open_ else Text())
    return handles, answer

def main() -> None:
    console, start = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False), time.perf_counter()
    with console.status("Loading model...") if console.is_terminal else nullcontext():
        engine = InferenceEngine(EngineConfig(cache=CacheConfig(num_blocks=96))).load()
        from llminfer.backends import make_result
    i = engine.info()
    console.print(f"{i['model']}: {i['family']}, {i['dtype']} on {i['device']}, {i['format']}; loaded in {time.perf_counter() - start:.1f} s. "
                  f"A pool of {i['num_blocks'] - 1} blocks, {i['block_size']} tokens each.\n", markup=False)
    start = time.perf_counter()
    with engine:
        handles, _ = watch(console, engine)
        seconds = time.perf_counter() - start
        results = [make_result(h) for h in handles]
    for letter, q, r in zip("ABCD", QUESTIONS, results): console.print(box(Text(r.generated_text.strip()), f"{letter}: {q}"))
    console.print(numbers(results, seconds))

if __name__ == "__main__": main()
