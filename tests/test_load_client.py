"""The load client: its times against a server that keeps a book, its names against the schema, and servers that misbehave."""
import asyncio, json, math, socket, subprocess, sys, threading
import jsonschema
import numpy as np
import pytest
from llminfer.config import ConfigError
from llminfer.load_client import LoadSettings, Timed, arrivals, drive, load_metrics, make_prompts, meets, mock_server, parse_limits, read_reply, run_load
from house import ROOT
from support.fake_openai import fake_openai
from support.upstream import our_server
from support.engines import tiny

SCHEMA = json.loads((ROOT / "benchmarks/records/schema/load.json").read_text())

def medians(book):
    "What the server itself wrote down: ms to the first token, and between tokens."
    return np.median([(p[1] - p[0]) * 1e3 for p in book]), np.median([(b - a) * 1e3 for p in book for a, b in zip(p[1:], p[2:])])

@pytest.mark.parametrize("endpoint, ttft, itl, n, concurrency", [("completions", 100, 20, 16, 4), ("chat", 60, 15, 16, 8), ("completions", 150, 40, 8, 8)])
def test_medians_are_within_5_percent_of_the_servers_own_book(endpoint, ttft, itl, n, concurrency):
    for _ in range(3):                 # the machine may be busy for a moment; the ruler may not be wrong three times
        with mock_server(ttft, itl) as mock: r = run_load(LoadSettings(mock.url, endpoint=endpoint, n_requests=n, output_len=8, max_concurrency=concurrency))
        m, (true_ttft, true_itl) = r.metrics, medians(mock.book)
        assert (m["completed"], m["total_output_tokens"], len(r.requests[0].stamps), m["max_concurrent_requests"] <= concurrency) == (n, 8 * n, 8, True)
        off = [m["median_ttft_ms"] / true_ttft - 1, m["median_itl_ms"] / true_itl - 1, m["median_tpot_ms"] / true_itl - 1]
        e2e = m["median_e2el_ms"] / (true_ttft + 7 * true_itl) - 1
        if max(map(abs, [*off, e2e])) < 0.05: return
    raise AssertionError((off, e2e, m["median_ttft_ms"], true_ttft))

def test_json_has_vllms_names_and_every_setting():
    with mock_server(5, 1) as mock: r = run_load(LoadSettings(mock.url, n_requests=9, output_len=5, request_rate=200, burstiness=0.5, limits={"ttft": 1e5}, n_warmup=2, seed=3))
    d = json.loads(json.dumps(r.to_dict(detailed=True)))
    jsonschema.validate(d, SCHEMA)
    assert len(mock.bodies) == 11 and d["completed"] == 9 and d["loop"] == "open" and d["request_goodput"] == pytest.approx(d["request_throughput"])
    assert d["settings"]["burstiness"] == 0.5 and "api_key" not in d["settings"] and [len(x) for x in d["itls"]] == [4] * 9 and d["output_lens"] == [5] * 9
    assert d["total_token_throughput"] == pytest.approx((d["total_input_tokens"] + 45) / d["duration"]) and d["total_input_tokens"] == 9 * 128
    assert d["client"]["dispatch_ms"]["median_dispatch_ms"] >= 0 and mock.bodies[-1]["ignore_eos"] is True

def test_token_counts_are_the_servers_and_pieces_are_not_tokens():
    with fake_openai() as (url, fake):
        fake.answer = lambda prompt: ("a", "b", "c")        # two tokens a piece
        r = run_load(LoadSettings(url + "/v1", endpoint="chat", n_requests=3))
    assert [t.output_tokens for t in r.requests] == [6] * 3 and [len(t.stamps) for t in r.requests] == [3] * 3   # the role is no token
    assert r.requests[0].text == "abc" and all(t.tpot * 5 == pytest.approx(t.e2e - t.ttft) for t in r.requests)

def test_errors_are_named_and_the_rest_is_kept():
    with fake_openai() as (url, fake):
        fake.status, fake.message = 429, "slow down"
        with pytest.raises(ConfigError, match="429"): run_load(LoadSettings(url))
    with fake_openai() as (url, fake):
        def answer(prompt):
            yield "a"
            if prompt == "bad": raise RuntimeError("the GPU is gone")
        fake.answer = answer
        r = run_load(LoadSettings(url, endpoint="chat", max_concurrency=1), ["good", "bad", "good"])
    assert r.errors() == {"the GPU is gone": 1} and r.metrics["completed"] == 2
    with mock_server(1, 1, fail_after=4) as mock: r = run_load(LoadSettings(mock.url, n_requests=10, output_len=2, max_concurrency=1))
    assert (r.metrics["completed"], r.metrics["failed"]) == (4, 6) and sum(r.errors().values()) == 6
    jsonschema.validate(json.loads(json.dumps(r.to_dict())), SCHEMA)

def test_a_server_that_never_answers_costs_its_timeout_only():
    with socket.create_server(("127.0.0.1", 0)) as s, mock_server(1, 1) as mock:
        open_ones = []
        threading.Thread(target=lambda: [open_ones.append(s.accept()) for _ in range(2)], daemon=True).start()
        r = asyncio.run(drive(LoadSettings(f"http://127.0.0.1:{s.getsockname()[1]}/v1", "m", timeout_s=0.2), ["x", "y"]))
        assert r.errors() == {"no end after 0.2 s": 2} and r.duration < 10 and mock.bodies == []

def test_an_interrupt_keeps_what_was_measured(tmp_path):
    code = ("import json, os, signal, threading, sys\nfrom llminfer.load_client import LoadSettings, mock_server, run_load\n"
        "with mock_server(5, 1) as mock:\n  n = iter(range(10**6))\n  stop = lambda t: os.kill(os.getpid(), signal.SIGINT) if next(n) == 5 else None\n"
        "  r = run_load(LoadSettings(mock.url, n_requests=500, output_len=3, max_concurrency=2), tell=stop)\n"
        "print(json.dumps([r.interrupted, r.metrics['completed'], r.errors()]))")
    p = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert p.returncode == 0, p.stderr
    interrupted, completed, errors = json.loads(p.stdout)
    assert interrupted and 5 <= completed < 100 and errors == {"interrupted": 500 - completed}

def test_every_cut_of_a_plain_body_and_ends_that_are_missing():
    body = b'data: {"choices": [{"index": 0, "text": "x"}]}\r\n\r\ndata: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 7}}\n\n'
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
    for cut in range(1, len(head + body)):
        t, raw = Timed(), head + body
        read_reply(t, [(1.0, raw[:cut]), (2.0, raw[cut:])], "")
        assert (t.text, t.output_tokens, t.error) == ("x", 7, "the stream broke off before its end")
    read_reply(t := Timed(), [(1.0, b"HTTP/1.1 503 Busy\r\nContent-Length: 40\r\n\r\n" + b'{"error": {"message": "queue is full"}}  ')], "")
    assert t.error == "status 503: queue is full"

def test_arrivals_keep_their_rate_and_prompts_their_lengths():
    for b in (0.3, 1.0, 50.0):
        at = arrivals(400, 25, b, seed=2)
        assert at[0] == 0 and at[-1] == pytest.approx(399 / 25) and (np.diff(at) >= 0).all()
    assert np.std(np.diff(arrivals(400, 25, 50))) < np.std(np.diff(arrivals(400, 25))) < np.std(np.diff(arrivals(400, 25, 0.3)))
    assert not arrivals(5, math.inf).any() and (arrivals(9, 5, seed=1) == arrivals(9, 5, seed=1)).all()
    tok = tiny()[2]
    prompts = make_prompts(20, 30, 0.5, prefix_len=8, seed=4, tokenizer=tok)
    assert len(set(prompts)) == 20 and len({p[:10] for p in prompts}) == 1
    assert all(0.5 * 30 + 5 <= len(tok.encode(p, add_special_tokens=False)) <= 1.5 * 30 + 14 for p in prompts)

def test_limits_and_numbers_of_nothing():
    t = Timed(sent=0, stamps=[0.1, 0.11, 0.15], output_tokens=3)
    assert meets(t, parse_limits(["ttft:100.1,itl:41"])) and not meets(t, {"ttft": 99}) and not meets(t, {"itl": 39}) and not meets(Timed(error="x"), {})
    m = load_metrics([], 1.0, {"ttft": 1})
    assert m["completed"] == m["output_throughput"] == m["p99_itl_ms"] == 0 and m["request_goodput"] == 0

def test_our_own_server_is_measured_like_any_other():
    with our_server(str(tiny()[0])) as url:
        r = run_load(LoadSettings(url, n_requests=6, output_len=7, input_len=5, max_concurrency=3))
    m = r.metrics
    assert (m["completed"], m["total_output_tokens"], m["failed"]) == (6, 42, 0) and 0 <= m["median_itl_ms"] < m["median_e2el_ms"] and m["median_ttft_ms"] > 0, r.errors()      # fast: some tokens come together

def test_a_connection_is_used_again_and_one_that_the_server_has_closed_is_not():
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
    opened, asked, end_after = [], [], [10**9]
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        def log_message(self, *args): pass
        def setup(self): super().setup(); opened.append(1)
        def plain(self, data, kind):
            self.send_response(200), self.send_header("Content-Type", kind), self.send_header("Content-Length", str(len(data))), self.end_headers()
            self.wfile.write(data)
        def do_GET(self): self.plain(b'{"data": [{"id": "m"}]}', "application/json"), setattr(self, "close_connection", True)
        def do_POST(self):
            asked.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200), self.send_header("Transfer-Encoding", "chunked"), self.end_headers()
            for part in (b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n', b"data: [DONE]\n\n", b""): self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
            self.close_connection = len(asked) >= end_after[0]
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        for end, connections in ((10**9, 1), (0, 6)):                # it keeps them; it closes each after its answer
            opened.clear(), asked.clear()
            end_after[0] = end
            r = run_load(LoadSettings(f"http://127.0.0.1:{server.server_address[1]}/v1", n_requests=6, output_len=1, max_concurrency=1))
            assert (r.metrics["completed"], len(asked), len(opened) - 1) == (6, 6, connections), r.errors()      # one more asked for the models
    finally: server.shutdown(), server.server_close()
