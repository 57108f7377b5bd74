"""Streams over real HTTP, byte by byte: framing, order, usage, n, failures, disconnects."""
from __future__ import annotations
import json, socket, time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Iterator
import pytest
from support.api import Server, frames, http_bytes, raw_request, serving, tiny_http
from support.engines import clean as clean, forced_engine, ids_of, tiny
from llminfer.serving import ServingLimits

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with tiny_http(app={"keep_alive_s": 0.05}, max_num_seqs=4) as s: yield s


def unchunk(raw: bytes) -> bytes:
    "Body of an HTTP/1.1 answer in chunked transfer coding."
    head, body = raw.split(b"\r\n\r\n", 1)
    assert b"transfer-encoding: chunked" in head.lower(), head
    out = b""
    while body:
        size, body = body.split(b"\r\n", 1)
        n = int(size, 16)
        out, body = out + body[:n], body[n + 2:]
        if n == 0: return out
    raise AssertionError("the last chunk is missing")


@pytest.mark.parametrize("path,body", [("/v1/chat/completions", {"messages": USER}), ("/v1/completions", {"prompt": "Once"})])
@pytest.mark.parametrize("usage", [None, {"include_usage": False}, {"include_usage": True}, {"continuous_usage_stats": True}])
@pytest.mark.parametrize("n_tokens", [1, 5])
def test_every_stream_is_framed_and_ordered(server, path, body, usage, n_tokens):
    "B32, from a raw socket."
    sent = {**body, "stream": True, "max_tokens": n_tokens, "temperature": 0, "ignore_eos": True, "stream_options": usage}
    data = frames(unchunk(raw_request(server.port, http_bytes(path, json.dumps(sent).encode()))))
    assert data.count("[DONE]") == 1 and data[-1] == "[DONE]"
    events = [json.loads(d) for d in data[:-1]]
    assert len({(e["id"], e["created"], e["model"], e["object"]) for e in events}) == 1
    with_choices = [e for e in events if e["choices"]]
    choices = [e["choices"][0] for e in with_choices]
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["length"]
    if "messages" in body: assert [c["delta"].get("role") for c in choices] == ["assistant"] + [None] * (len(choices) - 1)
    if usage in (None, {"include_usage": False}): assert with_choices == events and not any("usage" in e for e in events)
    else:
        assert events[:-1] == with_choices and events[-1]["usage"]["completion_tokens"] == n_tokens
        for e in with_choices: assert (e["usage"] is None) == ("include_usage" in usage)
    if usage and "continuous_usage_stats" in usage: assert events[-2]["usage"] | {"prompt_tokens_details": 0} == events[-1]["usage"] | {"prompt_tokens_details": 0}
    whole = server.post(path, **{**sent, "stream": False, "stream_options": None}).json()["choices"][0]
    text = "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)
    assert text == (whole["text"] if "text" in whole else whole["message"]["content"])


def test_three_seeded_samples_stream_as_they_are_answered(server):
    body = dict(messages=USER, n=3, seed=11, max_tokens=12)
    whole = server.chat("hi", **{k: v for k, v in body.items() if k != "messages"})["choices"]
    streamed = {i: "" for i in range(3)}
    for e in server.events("/v1/chat/completions", **body): streamed[e["choices"][0]["index"]] += e["choices"][0]["delta"].get("content", "")
    assert [streamed[i] for i in range(3)] == [c["message"]["content"] for c in whole] and len(set(streamed.values())) == 3


def test_many_prompts_with_two_samples_each_keep_their_index(server):
    body = dict(prompt=["One", "Two and a half", "Three"], n=2, seed=4, max_tokens=4)
    whole = server.complete(**body)
    streamed = {i: "" for i in range(6)}
    for e in server.events("/v1/completions", **body): streamed[e["choices"][0]["index"]] += e["choices"][0]["text"]
    assert [c["index"] for c in whole["choices"]] == list(range(6)) and [c["text"] for c in whole["choices"]] == list(streamed.values())
    alone = server.complete(**{**body, "prompt": "Two and a half"})
    assert [c["text"] for c in alone["choices"]] == [streamed[2], streamed[3]]


def test_the_first_chunk_comes_while_the_request_still_runs(server):
    with server.http.stream("POST", "/v1/chat/completions", json=dict(messages=USER, stream=True, max_tokens=100, ignore_eos=True)) as r:
        lines = r.iter_lines()
        assert '"content"' in next(lines)
        assert server.engine.stats()["open"] == 1
        assert sum(x.startswith("data: {") for x in lines) >= 50


def test_echo_with_scores_streams_what_it_answers(server):
    body = dict(prompt="The cat sat", max_tokens=3, echo=True, logprobs=2, temperature=0, ignore_eos=True)
    whole, events = server.complete(**body)["choices"][0], server.events("/v1/completions", **body)
    assert "".join(e["choices"][0]["text"] for e in events) == whole["text"]
    for k in ("tokens", "token_logprobs", "text_offset"):
        got = [x for e in events if e["choices"][0]["logprobs"] for x in e["choices"][0]["logprobs"][k]]
        if k == "token_logprobs": assert got[0] is None and got[1:] == pytest.approx(whole["logprobs"][k][1:], abs=1e-4)
        else: assert got == whole["logprobs"][k]


def scripted(text: Any, **cfg: Any) -> Any:
    "An engine that answers the chat `USER` with a text, then EOS."
    prompt = tiny()[2].encode_chat(USER)
    return forced_engine([], scripts={prompt[0]: prompt + ids_of(text) + [tiny()[2].eos_token_ids[0]]}, **cfg)


def test_text_of_many_bytes_a_character_arrives_whole():
    "B01 over HTTP."
    text = "ď🌶👩‍👩‍👧🇪🇺한 \u2028\x85 end"
    with serving(scripted(text)) as s:
        pieces = [e["choices"][0]["delta"].get("content", "") for e in s.events("/v1/chat/completions", messages=USER)]
        assert "".join(pieces) == text == s.chat()["choices"][0]["message"]["content"] and "\ufffd" not in "".join(pieces) and len(pieces) > 5


def test_an_answer_that_ends_at_once_has_a_role_and_a_reason():
    with serving(scripted("")) as s:
        a, b = [e["choices"][0] for e in s.events("/v1/chat/completions", messages=USER)]
        assert (a["delta"], a["finish_reason"], b["delta"], b["finish_reason"]) == ({"role": "assistant", "content": ""}, None, {}, "stop")
        kinds = [e["type"] for e in s.events("/v1/responses", input="hi")]
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        assert s.chat()["usage"]["completion_tokens"] == 1


def test_a_failure_in_mid_stream_is_an_event_and_then_the_end():
    prompt = tiny()[2].encode_chat(USER)
    with serving(scripted("abcdefghij", forced={"nan_at": {prompt[0]: len(prompt) + 4}})) as s:
        data = s.data("/v1/chat/completions", messages=USER)
        assert data[-1] == "[DONE]" and json.loads(data[-2])["error"]["code"] == "generation_failed" and len(data) > 3
        last = s.events("/v1/responses", input="hi")[-1]
        assert last["type"] == "response.failed" and last["response"]["status"] == "failed" and last["response"]["error"]["message"]
        r = s.post("/v1/chat/completions", messages=USER)
        assert (r.status_code, r.json()["error"]["type"], r.headers["x-should-retry"]) == (500, "server_error", "false")
        assert s.http.get("/health").status_code == 200


def test_silence_is_filled_with_comments():
    with tiny_http(app={"keep_alive_s": 0.02}, limits=ServingLimits(max_running=1), max_num_seqs=1) as s, ThreadPoolExecutor(1) as pool:
        long = pool.submit(s.complete, prompt="x", max_tokens=120, ignore_eos=True)
        while not s.engine.stats()["running"]: time.sleep(0.001)
        raw = raw_request(s.port, http_bytes("/v1/completions", json.dumps(dict(prompt="y", max_tokens=1, stream=True)).encode()), 30)
        assert b": keep-alive\n\n" in raw and frames(unchunk(raw))[-1] == "[DONE]"
        long.result()


def leave(server: Server, body: dict[str, Any], n_bytes: int) -> None:
    "Ask, read so many bytes of the answer (0: wait until it is being made), then go."
    seen = server.engine.stats()["counters"].get("accepted", 0)
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as s:
        s.sendall(http_bytes("/v1/completions", json.dumps(body).encode()))
        got = 0
        while got < n_bytes: got += len(s.recv(min(65536, n_bytes - got)))
        while not n_bytes and server.engine.stats()["counters"].get("accepted", 0) == seen: time.sleep(0.001)


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_leave_free_their_blocks(server, stream):
    "B33: leavers are cancelled, also those that wait for a whole answer; normal ends are not."
    server.settle()
    def left() -> int: return server.engine.stats()["counters"].get("left", 0)
    before, body = left(), dict(prompt="go", max_tokens=120, ignore_eos=True, stream=stream)
    with ThreadPoolExecutor(8 if stream else 1) as pool:
        list(pool.map(lambda _: leave(server, body, 500 if stream else 0), range(20)))
        server.settle()
        assert left() - before == 20, server.engine.stats()
        list(pool.map(lambda _: server.complete(prompt="stay", max_tokens=3), range(20)))
    server.settle()
    assert left() - before == 20


def test_responses_events_are_numbered_and_rebuild_the_answer(server):
    body = dict(input="hi", max_output_tokens=8, seed=3)
    events, whole = server.events("/v1/responses", **body), server.post("/v1/responses", **body).json()
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    assert "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta") == whole["output"][0]["content"][0]["text"]
    assert whole["status"] == "incomplete" and whole["incomplete_details"] == {"reason": "max_output_tokens"} and whole["usage"]["output_tokens"] == 8
    with server.http.stream("POST", "/v1/responses", json={**body, "stream": True}) as r: raw = b"".join(r.iter_raw())
    assert all(f.startswith(b"event: response.") and b"\ndata: {" in f for f in raw.split(b"\n\n")[:-1] if not f.startswith(b":"))
