"""litellm: three prefixes of chat and text, streams, responses, errors."""
import os
from typing import Any
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

kw = dict(api_base=os.environ["BASE_URL"], api_key=os.environ["API_KEY"], num_retries=0)
name, hi = os.environ["MODEL"], [{"role": "user", "content": "hi"}]
for prefix in ("hosted_vllm/", "openai/"):
    r = litellm.completion(model=prefix + name, messages=hi, max_tokens=6, seed=2, **kw)
    assert r.choices[0].message.content and r.usage.completion_tokens <= 6, r
    text = ""
    usage: Any = None
    for c in litellm.completion(model=prefix + name, messages=hi, max_tokens=6, seed=2, stream=True, stream_options={"include_usage": True}, **kw):
        if c.choices: text += c.choices[0].delta.content or ""
        usage = getattr(c, "usage", None) or usage
    assert text == r.choices[0].message.content and usage.total_tokens == r.usage.total_tokens
old = litellm.text_completion(model="text-completion-openai/" + name, prompt=["a", "b"], max_tokens=3, **kw)
assert len(old.choices) == 2
resp = litellm.responses(model="openai/" + name, input="hi", max_output_tokens=6, **kw)
assert resp.output and resp.usage.output_tokens <= 16, resp   # litellm asks for at least 16
for kind, bad in ((litellm.NotFoundError, dict(model="openai/nope", messages=hi)), (litellm.BadRequestError, dict(model="openai/" + name, messages=hi, temperature=9))):
    try: litellm.completion(**bad, **kw)
    except kind: pass
    else: raise AssertionError(f"no {kind.__name__}")
try: litellm.completion(model="openai/" + name, messages=[{"role": "user", "content": "word " * 2000}], **kw)
except litellm.ContextWindowExceededError: pass   # agents shorten their history when they see this one
else: raise AssertionError("no ContextWindowExceededError")
print("litellm: ok")
