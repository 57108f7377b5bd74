"""A question is answered through the paged engine, beside three others, while the pool of KV blocks is drawn: `make demo`."""
from __future__ import annotations
import queue, shutil, sys, time
from contextlib import nullcontext
from typing import Any
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from llminfer import EngineConfig, GenerationRequest, GenerationResult, InferenceEngine
from llminfer.backends import PagedEngine, RequestHandle, make_result
from llminfer.config import CacheConfig
from llminfer.kv_cache import draw_text
from llminfer.request import StreamChunk

SYSTEM = ("You are a careful assistant. Answer the question in two or three short sentences of plain English. Say first what is "
          "asked for, then one fact about it that a curious reader would like to know. If you do not know the answer, say so.")
QUESTIONS = ("What does a bee do all day?", "What is the capital of France?", "What is a prime number?", "How do birds fly?")
COLOURS = {"A": "#E69F00", "B": "#56B4E9", "C": "#009E73", "D": "#CC79A7", "=": "bold reverse", "c": "cyan"} | dict.fromkeys(".~#", "dim")
WIDTH = min(shutil.get_terminal_size((88, 24)).columns, 96)
News = queue.SimpleQueue[tuple[int, StreamChunk, str]]   # question, piece of its answer, drawing of the pool at that moment

def ask(engine: InferenceEngine, who: int, news: News) -> RequestHandle:
    "Queue a question. `notify` runs in the engine thread, which owns the pool: the right place to draw it."
    backend: Any = engine.backend
    labels = {i: f"{q}  blocks" for i, q in enumerate(QUESTIONS)}    # sequences are numbered in the order of their arrival
    def notify(chunk: StreamChunk) -> None: news.put((who, chunk, draw_text(backend.loop.core.scheduler.pool, labels, width=48)))
    ids = engine.encode_chat([{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTIONS[who]}])
    return backend.submit(GenerationRequest(prompt_token_ids=ids, max_new_tokens=64, temperature=0.0, stream=True), notify=notify)

def coloured(drawing: str) -> Text:
    "Give each sequence of a drawing its colour, in the map of blocks and before its table."
    lines = []
    for line in drawing.splitlines():
        text, in_map, in_table = Text(line), line[:6].strip().isdigit(), line[:5].isspace() and line[5:6].isupper()
        for i, mark in enumerate(line):
            if in_map and i > 6 or in_table and i == 5: text.stylize(COLOURS.get(mark, ""), i, i + 1)
        lines.append(text)
    return Text("\n").join(lines)

def box(content: Text, title: str) -> Panel: return Panel(content, title=Text(title), title_align="left", width=WIDTH)

def watch(console: Console, engine: InferenceEngine) -> list[RequestHandle]:
    "Ask, and show the first answer and the pool while all four run; each moment worth a look stays on the screen."
    news: News = queue.SimpleQueue()
    handles, answer, n_open, n_tokens, seen = [ask(engine, 0, news)], "", len(QUESTIONS), [0] * len(QUESTIONS), set[str]()
    live = Live(console=console, refresh_per_second=8, transient=True) if console.is_terminal else None
    with live or nullcontext():
        while n_open:
            who, chunk, drawing = news.get()
            if chunk.error: raise SystemExit(f"error: {chunk.error}")
            n_tokens[who] += len(chunk.token_ids)
            n_open -= chunk.is_final
            answer += chunk.token * (who == 0)
            title = ("A's prompt is in its blocks" if len(handles) == 1 else "all have ended: nothing is held" if not n_open else
                     "B has ended: its blocks are free, or cached (c) for whoever begins alike" if handles[1].finished.is_set() else
                     "all four run: the system prompt they share is held once (=)" if all(n_tokens) else "")
            if title and title not in seen: console.print(box(coloured(drawing), title))
            seen.add(title)
            if len(handles) == 1: handles += [ask(engine, i, news) for i in range(1, len(QUESTIONS))]
            if live: live.update(Group(box(Text(answer.strip() or " "), f"A: {QUESTIONS[0]}"), box(coloured(drawing), "the pool now")))
    return handles

def costs(results: list[GenerationResult], seconds: float) -> Group:
    "What each request cost, and all of them together."
    columns = ("", "prompt", "from cache", "new tokens", "TTFT", "latency", "tok/s", "ended by")
    t = Table(*columns, box=None, padding=(0, 2, 0, 0), header_style="bold")
    for letter, r in zip("ABCD", results):
        s, times = r.stats, (r.stats.time_to_first_token_ms, r.stats.total_latency_ms)
        t.add_row(Text(letter, COLOURS[letter]), *(str(x) for x in (s.prompt_tokens, s.cached_tokens, s.generated_tokens)),
            *(f"{x:.0f} ms" for x in times), f"{s.throughput_tokens_per_sec:.1f}", str(r.finish_reason))
    n, ttft = sum(r.stats.generated_tokens for r in results), results[0].stats.time_to_first_token_ms
    line = f"\ntokens={n}  latency={seconds * 1e3:.0f}ms  ttft={ttft:.0f}ms  tok/s={n / seconds:.1f}  (four requests together)"
    return Group(t, Text(line))

def main() -> None:
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    with console.status("Loading model...") if console.is_terminal else nullcontext():
        engine = InferenceEngine(EngineConfig(cache=CacheConfig(num_blocks=96))).load()
    with engine:
        assert isinstance(engine.backend, PagedEngine)
        i, start = engine.info(), time.perf_counter()
        console.print(Text(f"SmolLM2-135M-Instruct, {i['dtype']} on {i['device']}: small: fluent, not wise. "
                           f"{i['num_blocks'] - 1} blocks of KV.\n"))
        handles = watch(console, engine)
        seconds = time.perf_counter() - start
    results = [make_result(h) for h in handles]
    for letter, q, r in zip("ABCD", QUESTIONS, results): console.print(box(Text(r.generated_text.strip()), f"{letter}: {q}"))
    console.print(costs(results, seconds))

if __name__ == "__main__":
    try: main()
    except KeyboardInterrupt: sys.exit(130)
