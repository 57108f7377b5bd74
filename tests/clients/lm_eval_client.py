"""lm-eval's local-completions: loglikelihoods of pairs, printed as JSON for the caller to compare; local-chat-completions: generation."""
import json, os, sys
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

base, key = os.environ["BASE_URL"], os.environ["API_KEY"]
os.environ["OPENAI_API_KEY"] = key
pairs = json.loads(os.environ["PAIRS"])
lm = LocalCompletionsAPI(model=os.environ["MODEL"], base_url=base + "/completions", tokenizer_backend="huggingface", tokenizer=os.environ["TOK"], num_concurrent=1, max_length=256, batch_size=4)
got = lm.loglikelihood([Instance("loglikelihood", {}, (c, t), i) for i, (c, t) in enumerate(pairs)])
generated = lm.generate_until([Instance("generate_until", {}, ("Once", {"until": ["zzz"], "max_gen_toks": 6, "temperature": 0}), 0)])
chat = LocalChatCompletion(model=os.environ["MODEL"], base_url=base + "/chat/completions", num_concurrent=1)
from lm_eval.models.api_models import JsonChatStr
talk = chat.generate_until([Instance("generate_until", {}, (JsonChatStr(json.dumps([{"role": "user", "content": "hi"}])), {"until": ["zzz"], "max_gen_toks": 6}), 0)])
assert isinstance(talk[0], str) and isinstance(generated[0], str)
print("RESULT " + json.dumps([list(x) for x in got]))
print("lm-eval: ok", file=sys.stderr)
