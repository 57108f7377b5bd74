"""llama.cpp in a process of its own, for benchmarks/cpu_backends.py: a line of JSON in, a line out. Runs in .venv-llamacpp; imports nothing of llminfer.

    {"op": "load", "path": GGUF, "rows": 8, "max_len": 192, "threads": 2, "float32": false}
    {"op": "run", "prompts": [[id, ...], ...], "new": 48}       # ids of each answer, and when each token was known

Decoding is llama.cpp's own: one `llama_decode` a step for all rows, its greedy sampler in C; this file only fills the batch.
"""
import ctypes, json, os, sys, tempfile, time
import llama_cpp as lc


class Rows:
    "A model, a context with so many sequences, and the batch that is filled for each step."
    def __init__(self, path: str, rows: int, max_len: int, threads: int, float32: bool):
        self.rows, self.max_len = rows, max_len
        m = lc.llama_model_default_params()
        m.n_gpu_layers = 0
        self.model = lc.llama_model_load_from_file(path.encode(), m)
        if not self.model: raise RuntimeError(f"llama.cpp cannot load {path}")
        c = lc.llama_context_default_params()
        c.n_ctx, c.n_batch, c.n_ubatch, c.n_seq_max = rows * max_len, rows * max_len, 512, rows
        c.n_threads = c.n_threads_batch = threads
        if float32: c.type_k = c.type_v = lc.GGML_TYPE_F32
        self.ctx = lc.llama_init_from_model(self.model, c)
        if not self.ctx: raise RuntimeError("llama.cpp makes no context")
        self.batch, self.greedy = lc.llama_batch_init(rows * max_len, 0, 1), lc.llama_sampler_init_greedy()

    def put(self, token: int, pos: int, row: int, wanted: bool) -> None:
        b, i = self.batch, self.batch.n_tokens
        b.token[i], b.pos[i], b.n_seq_id[i], b.seq_id[i][0], b.logits[i] = token, pos, 1, row, wanted
        b.n_tokens = i + 1

    def step(self, rows: list[int]) -> list[int]:
        "Compute the batch; the next token of each of these rows, in the order in which they asked for logits."
        if code := lc.llama_decode(self.ctx, self.batch): raise RuntimeError(f"llama_decode gives {code}")
        wanted = [i for i in range(self.batch.n_tokens) if self.batch.logits[i]]
        return [lc.llama_sampler_sample(self.greedy, self.ctx, i) for i in wanted]

    def generate(self, prompts: list[list[int]], new: int) -> list[dict]:
        "A batch of prompts, all at once; every row gets `new` tokens."
        lc.llama_memory_clear(lc.llama_get_memory(self.ctx), True)
        out = [{"sent": time.perf_counter(), "token_ids": [], "stamps": []} for _ in prompts]
        rows, length = list(range(len(prompts))), [len(p) for p in prompts]
        for k in range(new):
            self.batch.n_tokens = 0
            for r in rows:
                if k: self.put(out[r]["token_ids"][-1], length[r] + k - 1, r, True)
                else:
                    for i, t in enumerate(prompts[r]): self.put(t, i, r, i == length[r] - 1)
            tokens, now = self.step(rows), time.perf_counter()
            for r, t in zip(rows, tokens):
                out[r]["token_ids"].append(t)
                out[r]["stamps"].append(now)
        return out


def as_float32(path: str) -> str:
    "The same weights written out in float32, so that llama.cpp computes in the precision of the others; kept beside other temporary files."
    out = os.path.join(tempfile.gettempdir(), os.path.basename(path).removesuffix(".gguf") + ".F32.gguf")
    if os.path.exists(out): return out
    q = lc.llama_model_quantize_default_params()
    q.ftype, q.allow_requantize = lc.LLAMA_FTYPE_ALL_F32, True
    if lc.llama_model_quantize(path.encode(), (out + ".part").encode(), ctypes.byref(q)): raise RuntimeError(f"{path} cannot be written in float32")
    os.replace(out + ".part", out)
    return out


def answer(state: list, d: dict) -> dict:
    if d["op"] == "load":
        path = as_float32(d["path"]) if d["float32"] else d["path"]
        state[:] = [Rows(path, d["rows"], d["max_len"], d["threads"], d["float32"])]
        return {"version": lc.__version__, "system": lc.llama_print_system_info().decode()}
    start = time.perf_counter()
    out = state[0].generate(d["prompts"], d["new"])
    rss = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return {"requests": out, "seconds": time.perf_counter() - start, "rss_mb": rss}


def main() -> None:
    pipe, state = os.fdopen(os.dup(1), "w"), []
    os.dup2(2, 1)
    lc.llama_backend_init()
    for line in sys.stdin:
        try: reply = answer(state, json.loads(line))
        except Exception as e: reply = {"error": f"{type(e).__name__}: {e}"}
        print(json.dumps(reply), file=pipe, flush=True)


if __name__ == "__main__": main()
