"""Train a draft head (one layer, a few million numbers) on text that the model writes itself, and save it for `assistant_model_name`.

    nice python examples/train_draft_head.py --out heads/demo --minutes 8
    llminfer run "How does a bicycle stay upright?" --assistant-model heads/demo

Four steps: the model answers prompts (sampled, batched); its hidden states are computed once; a layer learns to say the next one from the
hidden state before and the token between, once from true states and once from its own; the held-out acceptance is printed and saved.
"""
import argparse
import random
import time
from collections import Counter
import torch
import torch.nn.functional as F
from llminfer.assembly import build_core
from llminfer.config import EngineConfig
from llminfer.core import CoreConfig, generate
from llminfer.draft_head import HEAD_PARTS, head_source, new_head, save_head
from llminfer.loading import load_model, open_checkpoint
from llminfer.model import Dense, causal_attention
from llminfer.request import SamplingParams
from llminfer.tokenization import load_tokenizer

TOPICS = """the moon; bread; a violin; chess; bees; Paris; the sea; a garden; football; a train; winter; coffee; a library; the
heart; maps; salt; a bridge; dreams; a computer; whales; the wind; money; a school; paint; rivers; the internet; a
doctor; a river boat; silk; glass; volcanoes; trees; photography; sleep; tea; a clock; the Roman empire; electricity;
cheese; a mountain hut; ants; poetry; batteries; rice; a small shop; languages; the desert; bicycles for children; rain;
stars""".replace("\n", " ").split("; ")
FORMS = [
    "Explain {} to a child.", "Write a short story about {}.", "What should I know about {}?", "List five facts about {}.",
    "Write a short poem about {}.", "Give me some advice about {}.", "Why is {} important?", "Describe {} in one paragraph.",
    "Write a python function that has to do with {}.", "Compare {} with something else.", "What is the history of {}?",
    "Invent six names for a book about {}, each with a reason.", "Write an e-mail to a friend about {}.",
    "Summarise what people think about {}."]


def own_text(model, tok, n, tokens, seed):
    "n prompts with the model's answers: (ids, length of the prompt)."
    r = random.Random(seed)
    pairs = [(f, t) for f in FORMS for t in TOPICS]
    pairs = r.sample(pairs * -(-n // len(pairs)), n)                      # more than there are: again, sampled anew
    prompts = [tok.encode_chat([{"role": "user", "content": f.format(t)}]) for f, t in pairs]
    longest, ends = max(map(len, prompts)) + tokens, tuple(tok.eos_token_ids)
    rows = 16 if model.device.type == "cpu" else 256
    core = build_core(EngineConfig(), model, CoreConfig(n_blocks=1 + rows * -(-longest // 16), max_model_len=longest, max_num_seqs=rows))
    params = [SamplingParams(temperature=r.choice([0.0, 0.7, 1.0]), top_p=0.95, seed=i, max_tokens=tokens, stop_ids=ends, eos_ids=ends)
        for i in range(n)]
    return [(p + a, len(p)) for p, a in zip(prompts, generate(core, prompts, params))]


@torch.no_grad()
def states_of(model, texts):
    "(ids, prompt length, hidden states [L, D] after the final norm) of each text."
    at = causal_attention(model.config.windows)
    def one(ids): return model.forward(ids, torch.arange(len(ids), device=ids.device), at)
    return [(x := torch.tensor(ids, device=model.device), n, one(x)) for ids, n in texts]


def steps_through(source, ids, hidden, rounds):
    "The head's states [L, D] for positions 0 .. L - 1, first from the target's states, then from its own of the round before."
    at, before = causal_attention(source.model.config.windows), F.pad(hidden[:-1], (0, 0, 1, 0))
    places = torch.arange(len(ids), device=ids.device)
    for _ in range(rounds):
        source.model.embed = source.mix(before, ids)
        yield (out := source.model.forward(places, places, at))
        before = F.pad(out[:-1], (0, 0, 1, 0))


def loss_of(source, head, ids, n, hidden):
    "Cross entropy to the target's distribution over the head's words, of two rounds."
    want = F.softmax(hidden[n - 1:] @ head.t(), -1)
    return sum(F.cross_entropy(out[n - 1:] @ head.t(), want) for out in steps_through(source, ids, hidden, 2)) / 2


@torch.no_grad()
def acceptance(source, words, held):
    "Share of places where the head's favourite is the target's, by round: the first guess, the second behind a right first, ..."
    right, seen = [0, 0, 0], [0, 0, 0]
    for ids, n, hidden, best in held:
        fine = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
        for k, out in enumerate(steps_through(source, ids, hidden, 3)):
            hit = words[source.model.head(out).argmax(-1)] == best
            here = fine[n - 1:]
            right[k] += int((hit[n - 1:] & here).sum())
            seen[k] += int(here.sum())
            fine = F.pad((hit & fine)[:-1], (1, 0))          # the next guess at t + 1 is made if this one at t was right
    return [round(a / max(b, 1), 3) for a, b in zip(right, seen)]


def main():
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--model", default="demo")
    ap.add_argument("--out", required=True)
    ap.add_argument("--texts", type=int, default=320)
    ap.add_argument("--tokens", type=int, default=128)
    ap.add_argument("--words", type=int, default=4096)
    ap.add_argument("--minutes", type=float, default=8.0, help="of the whole run, on a CPU processor time; training gets what is left")
    ap.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    ap.add_argument("--lr", type=float, default=1e-3)
    a = ap.parse_args()
    clock = time.process_time if a.device == "cpu" else time.perf_counter
    start, end = clock(), clock() + 60 * a.minutes
    torch.manual_seed(0)
    ckpt = open_checkpoint(a.model)
    tok, writer = load_tokenizer(ckpt.tokenizer), load_model(ckpt, torch.float32, a.device)
    texts = own_text(writer, tok, a.texts, a.tokens, 0)
    print(f"{sum(len(i) - n for i, n in texts)} tokens written in {clock() - start:.0f} s", flush=True)
    del writer
    model = load_model(ckpt, torch.float32, a.device, linear=Dense)
    data = states_of(model, texts)
    count = Counter(i for ids, _ in texts for i in ids)
    unused = [i for i in range(model.config.vocab_size) if i not in count]      # low ids are short, frequent pieces
    words = torch.tensor(sorted([i for i, _ in count.most_common(a.words)] + unused[:max(0, a.words - len(count))]), device=a.device)
    print(f"hidden states after {clock() - start:.0f} s; {len(count)} words used, {len(words)} kept", flush=True)
    tensors = {k: v.requires_grad_(k != "head") for k, v in new_head(model, words).items()}
    source = head_source(tensors | {"words": words}, model, Dense)
    held, data = [(i, n, h, model.head(h).argmax(-1)) for i, n, h in data[:16]], data[16:]
    opt = torch.optim.AdamW([v for k, v in tensors.items() if k != "head"], lr=a.lr, betas=(0.9, 0.95), weight_decay=0.01)
    r, seen, losses, begun = random.Random(1), 0, [], clock()
    print("before:", acceptance(source, words, held), flush=True)
    while clock() < end - min(10, 6 * a.minutes):      # the rest is for the last measurement
        left = (end - clock()) / (end - begun)
        for g in opt.param_groups: g["lr"] = a.lr * min(1, (seen + 8) / 160) * max(left, 0.02)
        batch = r.sample(data, 4)
        loss = sum(loss_of(source, tensors["head"], i, n, h) for i, n, h in batch) / 4
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for g in opt.param_groups for p in g["params"]], 1.0)
        opt.step()
        seen, losses = seen + 4, [*losses[-49:], loss.item()]
        if seen % 200 == 0:
            print(f"{clock() - start:4.0f} s, {seen} texts: loss {sum(losses) / len(losses):.3f}, "
                f"held-out acceptance {acceptance(source, words, held)}", flush=True)
    final = acceptance(source, words, held)
    trained = {k: tensors[k].detach().cpu() for k in HEAD_PARTS} | {"words": words.cpu()}
    save_head(a.out, trained, a.model, acceptance=final, texts=len(texts),
        texts_seen=seen, seconds=round(clock() - start))
    print(f"saved in {a.out}: held-out acceptance of the first, second and third guess {final}")


if __name__ == "__main__": main()
