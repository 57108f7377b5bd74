"""Answers bound to a form, over real HTTP: response_format, vLLM's fields, tools that must be called, text.format; with the openai client."""
from __future__ import annotations
import json, re
from pathlib import Path
from typing import Any, Iterator, Literal
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field
from support.api import Server, serving, tiny_http
from support.engines import clean as clean
from test_api import GREEDY as GREEDY, QWEN, TOOLS, USER, error_of
from llminfer.config import EngineConfig
from llminfer.engine import InferenceEngine
from llminfer.loading import make_tiny

WORD = {"type": "string", "enum": ["red", "green", "blue"]}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"color": WORD, "dark": {"type": "boolean"}}, "required": ["color", "dark"], "additionalProperties": False}
STRICT = {"type": "function", "function": {"name": "paint", "strict": True, "parameters": SCHEMA}}
SHORT = {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with tiny_http() as s: yield s


@pytest.fixture(scope="module")
def caller(tmp_path_factory) -> Iterator[Server]:
    "A model whose template has Qwen's marks of tool calls."
    folder = make_tiny(Path(tmp_path_factory.mktemp("qwen")) / "m", max_position_embeddings=1024)
    cfg = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(cfg | {"chat_template": QWEN}))
    with serving(InferenceEngine(EngineConfig(str(folder), device="cpu", dtype="float32", max_model_len=768)), served_model_name="tiny") as s: yield s


def client(s: Server) -> OpenAI: return OpenAI(base_url=s.url + "/v1", api_key="x", max_retries=0, timeout=60)


def fits(text: str) -> dict[str, Any]:
    d = json.loads(text)
    assert set(d) == {"color", "dark"} and d["color"] in WORD["enum"] and isinstance(d["dark"], bool), text
    return d


FORMS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "paint", "schema": SCHEMA, "strict": True}}}, "json"),
    ({"structured_outputs": {"json": SCHEMA}}, "json"), ({"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}}, "json"),
    ({"guided_json": SCHEMA}, "json"), ({"structured_outputs": {"regex": "[ab]{3}-[0-9]+x"}}, r"[ab]{3}-[0-9]+x"), ({"guided_regex": "(no|yes){2}"}, "(no|yes){2}"),
    ({"structured_outputs": {"choice": ["north", "northwest"]}}, "north|northwest"), ({"guided_choice": ["up", "down"]}, "up|down"),
    ({"structured_outputs": {"grammar": 'root ::= "x" | "(" root ")"'}}, r"\(*x\)*"), ({"guided_grammar": 'root ::= "a" "b"?'}, "ab?")]


@pytest.mark.parametrize("form,want", FORMS)
def test_every_field_that_binds_an_answer(server, form, want):
    n_whole = 0
    for path, body in (("/v1/chat/completions", {"messages": USER, "n": 2}), ("/v1/completions", {"prompt": ["a", "b"]})):
        for seed in range(2):
            body |= {"max_tokens": 60, "temperature": 1.5, "seed": seed, **form}
            r = server.post(path, **body)
            assert r.status_code == 200, r.text
            out, pieces = r.json()["choices"], [""] * 2
            texts = [c["message"]["content"] if "message" in c else c["text"] for c in out]
            for c, text in zip(out, texts):
                if c["finish_reason"] == "length": continue
                n_whole += 1
                assert c["finish_reason"] == "stop" and (fits(text) if want == "json" else re.fullmatch(want, text)), text
            for e in server.events(path, **body):
                for c in e["choices"]: pieces[c["index"]] += (c["delta"].get("content") or "") if "delta" in c else c["text"]
            assert pieces == texts
    assert n_whole >= 4
    server.settle()


def test_json_objects_and_neighbours_that_keep_their_text(server):
    want = server.complete(prompt="steady", max_tokens=40, **GREEDY)["choices"][0]["text"]
    d = server.chat("hi", max_tokens=60, temperature=1, seed=1, response_format={"type": "json_object"})["choices"][0]
    assert d["message"]["content"].startswith("{") and (d["finish_reason"] == "length" or isinstance(json.loads(d["message"]["content"]), dict))
    assert server.complete(prompt="steady", max_tokens=40, **GREEDY)["choices"][0]["text"] == want
    text = server.http.get("/metrics").text
    n = re.search(r"^llminfer_grammar_mask_seconds_count\{[^}]*\} (\S+)", text, re.M)
    assert n and float(n[1]) > 0 and float(re.search(r"^llminfer_grammar_mask_seconds_sum\{[^}]*\} (\S+)", text, re.M)[1]) > 0   # type: ignore[index]


def test_refused_at_the_door_with_the_clients_own_field(server, caller):
    bad = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    chat, text = "/v1/chat/completions", "/v1/completions"
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": bad}}
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": bad}}
    cases: list[tuple[Server, str, dict[str, Any], str]] = [
        (server, chat, {"messages": USER, "response_format": form}, "response_format"), (server, text, {"prompt": "x", "response_format": form}, "response_format"),
        (server, chat, {"messages": USER, "guided_json": bad}, "guided_json"), (server, chat, {"messages": USER, "structured_outputs": {"json": bad}}, "structured_outputs"),
        (server, "/v1/responses", {"input": "hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": bad}}}, "text.format"),
        (caller, chat, {"messages": USER, "tools": [tool]}, "tools[0].function.parameters")]
    for s, path, body, param in cases:
        r = s.post(path, **body)
        assert error_of(r) == (400, param, "unsupported_schema") and "uniqueItems" in r.text, (param, r.text)
        if path != "/v1/responses": assert error_of(s.post(path, stream=True, **body))[1] == param
    for body in ({"response_format": {"type": "json_schema"}}, {"response_format": {"type": "yaml"}}, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "colour"}}}},
                 {"structured_outputs": {}}, {"structured_outputs": {"regex": "["}}, {"guided_regex": "("}, {"guided_grammar": "root ::="}, {"guided_choice": []}, {"structured_outputs": {"json": SCHEMA, "regex": "a"}},
                 {"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, {"response_format": {"type": "json_object"}, "ignore_eos": True}, {"regex": "a"}, {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}):
        status, param, _ = error_of(server.post(chat, messages=USER, **body))
        assert status == 400 and param in (*body, "response_format.type"), (body, param)
    server.settle()


class Paint(BaseModel):
    model_config = ConfigDict(extra="forbid")
    color: Literal["red", "green", "blue"]
    dark: bool = Field(description="whether it is dark")


def test_openai_parse(server, caller):
    with client(server) as c:
        got = c.chat.completions.parse(model="tiny", messages=USER, response_format=Paint, temperature=1, seed=4, max_completion_tokens=60)
        assert isinstance(got.choices[0].message.parsed, Paint)
        with c.chat.completions.stream(model="tiny", messages=USER, response_format=Paint, temperature=1, seed=4, max_completion_tokens=60) as s:
            final = s.get_final_completion()
        assert final.choices[0].message.parsed == got.choices[0].message.parsed
        answer = c.responses.parse(model="tiny", input="hi", text_format=Paint, temperature=1, max_output_tokens=60, extra_body={"seed": 4})
        assert isinstance(answer.output_parsed, Paint) and answer.text.format.type == "json_schema"
        with pytest.raises(openai.LengthFinishReasonError): c.chat.completions.parse(model="tiny", messages=USER, response_format=Paint, max_completion_tokens=2)
    with client(caller) as c:
        tool = openai.pydantic_function_tool(Paint, name="paint")
        done = c.chat.completions.parse(model="tiny", messages=USER, tools=[tool], tool_choice="required", parallel_tool_calls=False, temperature=1, seed=1, max_completion_tokens=250)
        (call,) = done.choices[0].message.tool_calls
        assert call.function.name == "paint" and isinstance(call.function.parsed_arguments, Paint) and done.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("choice,names", [("required", {"paint", "stop"}), ({"type": "function", "function": {"name": "paint"}}, {"paint"})])
def test_calls_that_must_come(caller, choice, names):
    n_whole = 0
    for seed in range(4):
        body = dict(messages=USER, tools=[STRICT, SHORT], tool_choice=choice, temperature=1.3, seed=seed, max_tokens=300, parallel_tool_calls=seed % 2 == 0)
        r = caller.post("/v1/chat/completions", **body)
        assert r.status_code == 200, r.text
        c = r.json()["choices"][0]
        if c["finish_reason"] == "length": continue
        n_whole += 1
        calls = c["message"]["tool_calls"]
        assert c["finish_reason"] == "tool_calls" and not c["message"]["content"] and (seed % 2 == 0 and choice == "required" or len(calls) == 1)
        for f in (x["function"] for x in calls):
            assert f["name"] in names and (fits(f["arguments"]) if f["name"] == "paint" else json.loads(f["arguments"]) == {})
        built: list[Any] = []
        for e in caller.events("/v1/chat/completions", **body):
            for d in (x for ch in e["choices"] for x in ch["delta"].get("tool_calls") or []): built.append((d["function"]["name"], d["function"]["arguments"]))
        assert built == [(x["function"]["name"], x["function"]["arguments"]) for x in calls]
    assert n_whole >= 2
    flat = [{"type": "function", "name": "paint", "parameters": SCHEMA, "strict": True}]
    out = caller.post("/v1/responses", input="hi", tools=flat, tool_choice="required" if choice == "required" else {"type": "function", "name": "paint"}, temperature=1, seed=1,
        max_output_tokens=300, parallel_tool_calls=False).json()
    assert out["status"] == "completed" and [o["type"] for o in out["output"]] == ["function_call"] and fits(out["output"][0]["arguments"])


def test_a_call_or_the_form_that_was_asked_for(caller):
    "tools with auto beside response_format: either calls that fit, or the JSON."
    kinds = set()
    for seed in range(8):
        c = caller.chat("hi", tools=[STRICT], response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, temperature=1, seed=seed, max_tokens=200,
            logit_bias={str(caller.engine.tokenizer.encode("<tool_call>", add_special_tokens=False)[0]): 3 * (seed % 2)})["choices"][0]
        kinds.add(kind := c["finish_reason"])
        if kind == "tool_calls": assert all(fits(x["function"]["arguments"]) for x in c["message"]["tool_calls"])
        elif kind == "stop": fits(c["message"]["content"])
    assert kinds & {"stop", "tool_calls"}


def test_strict_tools_leave_prose_free(caller):
    c = caller.chat("hi", tools=[STRICT], temperature=1, seed=3, max_tokens=30, ignore_eos=False)["choices"][0]
    assert c["finish_reason"] in ("length", "stop", "tool_calls")
    for choice, why in (({"type": "function", "function": {"name": "nope"}}, "paint"), ("sometimes", "required"), ({"type": "allowed_tools"}, "paint")):
        r = caller.post("/v1/chat/completions", messages=USER, tools=[STRICT], tool_choice=choice)
        assert error_of(r)[:2] == (400, "tool_choice") and why in r.text
    assert error_of(caller.post("/v1/chat/completions", messages=USER, tool_choice="required"))[:2] == (400, "tool_choice")
    assert caller.post("/v1/chat/completions", messages=USER, tools=TOOLS, max_tokens=1).status_code == 200
