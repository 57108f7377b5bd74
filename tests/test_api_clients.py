"""Clients that people have, over real HTTP: openai (sync, async, streams, errors), curl, schemathesis. Heavier ones: tests/clients."""
from __future__ import annotations
import asyncio, json, subprocess, sys
from typing import Any, Iterator
import openai
import pytest
from benchmarks import http_load
from openai import AsyncOpenAI, OpenAI
from support.api import KEY, Server, frames, tiny_http
from support.engines import clean as clean
from llminfer.serving import ServingLimits

USER: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with tiny_http(app={"api_key": KEY}) as s: yield s


@pytest.fixture(scope="module")
def client(server) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0, timeout=60) as c: yield c


def test_openai_chat_and_completions(client):
    assert [m.id for m in client.models.list()] == ["tiny"] and client.models.retrieve("tiny").owned_by == "llminfer"
    whole = client.chat.completions.create(model="tiny", messages=USER, max_completion_tokens=6, seed=2, logprobs=True, top_logprobs=2)
    assert whole.usage.completion_tokens == len(whole.choices[0].logprobs.content) == 6 and whole.choices[0].finish_reason == "length"
    text = ""
    for c in client.chat.completions.create(model="tiny", messages=USER, max_completion_tokens=6, seed=2, stream=True, stream_options={"include_usage": True}):
        if c.choices: text += c.choices[0].delta.content or ""
        else: assert c.usage.total_tokens == whole.usage.total_tokens
    assert text == whole.choices[0].message.content
    with client.chat.completions.stream(model="tiny", messages=USER, max_completion_tokens=6, seed=2, extra_body={"ignore_eos": True}) as s:
        with pytest.raises(openai.LengthFinishReasonError): s.get_final_completion()
    old = client.completions.create(model="tiny", prompt=["a", "b"], n=2, max_tokens=3, seed=1, logprobs=1)
    assert [c.index for c in old.choices] == [0, 1, 2, 3] and old.choices[0].logprobs.text_offset[0] == 0
    pieces = ["", "", "", ""]
    for c in client.completions.create(model="tiny", prompt=["a", "b"], n=2, max_tokens=3, seed=1, stream=True): pieces[c.choices[0].index] += c.choices[0].text
    assert pieces == [c.text for c in old.choices]


def test_openai_responses(client):
    whole = client.responses.create(model="tiny", input="hi", instructions="Be brief.", max_output_tokens=6, extra_body={"seed": 5})
    with client.responses.stream(model="tiny", input="hi", instructions="Be brief.", max_output_tokens=6, extra_body={"seed": 5}) as s:
        kinds = [e.type for e in s]
        final = s.get_final_response() if "response.completed" in kinds else None
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    assert whole.output_text and whole.status in ("incomplete", "completed") and (final is None or final.output_text == whole.output_text)
    follow = [{"role": "user", "content": "hi"}, *[o.model_dump() for o in whole.output], {"role": "user", "content": "more"}]
    assert client.responses.create(model="tiny", input=follow, max_output_tokens=2).usage.output_tokens <= 2   # type: ignore[arg-type]


def test_openai_errors(server, client):
    def fails(kind: type[Exception], **kw: Any) -> Any:
        with pytest.raises(kind) as e: client.chat.completions.create(**{"model": "tiny", "messages": USER, **kw})
        return e.value
    assert fails(openai.NotFoundError, model="nope").code == "model_not_found"
    assert fails(openai.BadRequestError, temperature=9).param == "temperature"
    assert fails(openai.BadRequestError, messages=[{"role": "user", "content": "long " * 300}]).code == "context_length_exceeded"
    assert fails(openai.BadRequestError, stream=True, messages=[]).param == "messages"
    with OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0) as c, pytest.raises(openai.AuthenticationError): c.models.list()
    big = OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0)
    with pytest.raises(openai.APIStatusError) as e: big.completions.create(model="tiny", prompt="x" * 9_000_000)
    assert e.value.status_code == 413


def test_openai_waits_and_tries_again_when_the_queue_is_full():
    with tiny_http(limits=ServingLimits(max_queued_requests=1, max_running=1), max_num_seqs=1) as s:
        async def main() -> list[Any]:
            async with AsyncOpenAI(base_url=s.url + "/v1", api_key="any", max_retries=8) as c:
                return await asyncio.gather(*(c.completions.create(model="tiny", prompt="x", max_tokens=20) for _ in range(6)))
        assert len(asyncio.run(main())) == 6
        assert s.engine.stats()["counters"].get("rejected_queue_full", 1) >= 1


def test_openai_async_streams_together(server):
    async def one(c: AsyncOpenAI, i: int) -> int:
        n = 0
        async for x in await c.chat.completions.create(model="tiny", messages=USER, max_tokens=i, stream=True, extra_body={"ignore_eos": True, "return_token_ids": True}):
            if x.choices: n += len(getattr(x.choices[0], "token_ids", None) or [])
        return n
    async def main() -> list[int]:
        async with AsyncOpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0) as c:
            return await asyncio.gather(*(one(c, i) for i in range(1, 21)))
    assert asyncio.run(main()) == list(range(1, 21))


def test_curl(server):
    body = json.dumps({"model": "tiny", "stream": True, "stream_options": {"include_usage": True}, "messages": USER, "max_tokens": 4})
    r = subprocess.run(["curl", "-sN", f"{server.url}/v1/chat/completions", "-H", "content-type: application/json", "-H", f"authorization: Bearer {KEY}", "-d", body],
        capture_output=True, timeout=30)
    assert r.returncode == 0 and frames(r.stdout)[-1] == "[DONE]" and json.loads(frames(r.stdout)[-2])["choices"] == []
    head = subprocess.run(["curl", "-sI", f"{server.url}/metrics"], capture_output=True, text=True, timeout=30).stdout
    assert head.startswith("HTTP/1.1 200") and "llminfer_" not in head


def test_schemathesis_finds_nothing(server):
    r = subprocess.run([sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "-H", f"Authorization: Bearer {KEY}", "--max-examples", "8", "--seed", "1",
        "--generation-deterministic", "--phases", "examples,fuzzing", "--exclude-checks", "positive_data_acceptance,ignored_auth", "--max-failures", "5"], capture_output=True, text=True, timeout=240)
    assert r.returncode == 0, r.stdout[-6000:] + r.stderr[-2000:]


def test_load_overload_and_leavers():
    "A sample of the load: 40 clients with 200 calls, more than the queue takes, 40 clients that leave. All of it: python benchmarks/http_load.py."
    with tiny_http(limits=ServingLimits(max_queued_requests=48), max_num_seqs=8, max_model_len=256) as s:
        calls = asyncio.run(http_load.many_clients(s.port, 40, 200))
        assert not calls["failed"], calls
        over = asyncio.run(http_load.overload(s.port, 10, 1.0))
        assert not over["wrong"] and over["accepted"] and over["refused"], over
        gone = asyncio.run(http_load.leavers(s.port, 40))
        assert (gone["blocks_held"], gone["running"], gone["next_status"]) == (0, 0, 200), gone
        s.settle()
