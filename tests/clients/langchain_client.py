"""langchain-openai: chat, stream, tools bound, Responses API. BASE_URL and MODEL come from the environment."""
import asyncio, os
from langchain_openai import ChatOpenAI, OpenAI

kw = dict(base_url=os.environ["BASE_URL"], api_key=os.environ["API_KEY"], model=os.environ["MODEL"], max_retries=0)
chat = ChatOpenAI(**kw, max_tokens=8, seed=3, temperature=1.0, stream_usage=True)
whole = chat.invoke([("system", "Be brief."), ("human", "hi")])
assert whole.content and whole.usage_metadata["output_tokens"] <= 8 and whole.response_metadata["finish_reason"] in ("length", "stop"), whole
pieces = list(chat.stream([("system", "Be brief."), ("human", "hi")]))
assert "".join(p.content for p in pieces) == whole.content and sum((p.usage_metadata or {}).get("output_tokens", 0) for p in pieces) == whole.usage_metadata["output_tokens"]
batch = chat.batch(["one", "two", "three"])
assert len(batch) == 3
async def together():
    return await asyncio.gather(*(chat.ainvoke(f"number {i}") for i in range(4)))
assert len(asyncio.run(together())) == 4
parts = chat.invoke([{"role": "user", "content": [{"type": "text", "text": "hi"}]}])
assert parts.content
scored = ChatOpenAI(**kw, max_tokens=3, logprobs=True, top_logprobs=2).invoke("hi")
assert len(scored.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2
responses = ChatOpenAI(**kw, max_tokens=8, use_responses_api=True, output_version="responses/v1").invoke("hi")
assert responses.text if isinstance(responses.text, str) else responses.text(), responses
streamed = list(ChatOpenAI(**kw, max_tokens=8, use_responses_api=True).stream("hi"))
assert streamed
assert isinstance(OpenAI(**kw, max_tokens=5).invoke("Once"), str)
print("langchain-openai: ok")
