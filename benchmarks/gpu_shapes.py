"""Model shapes of the GPU comparison: their floors, their prompts, and folders of weights whose greedy text has clear margins.

Random weights alone give logits whose two best are a fifth of their spread apart: bf16 rounding changes one token in ten and a token check says little.
Here the last layer copies: all its heads attend alike and sharply to one place, and its values and output carry that place's embedding, turned so that it
points at the following id. Which place wins depends on everything before, since every layer adds its share to the residual: a wrong block or position shows
as another token, and rounding does only where two places nearly tie.
"""
from __future__ import annotations
import json, math, random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
import torch
from torch import Tensor
from llminfer.formats import write_safetensors
from llminfer.loading import Weights, open_checkpoint
from llminfer.model import EMBED, HEAD, NORM, ModelConfig, layer_shapes
from llminfer.tokenization import load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
BYTES_S, FLOP_S = 4.3e12, 790e12   # H200: copy bandwidth and bf16 matrix rate as measured, not the data sheet's


def _qwen3(L: int, D: int, H: int, G: int, E: int, F: int, V: int, tied: bool, theta: float) -> dict[str, Any]:
    "The config.json of a Qwen3 of this size."
    return dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_act="silu", rms_norm_eps=1e-6, attention_bias=False, dtype="bfloat16",
        max_position_embeddings=4096, use_cache=True, bos_token_id=1, eos_token_id=2, num_hidden_layers=L, hidden_size=D, num_attention_heads=H,
        num_key_value_heads=G, head_dim=E, intermediate_size=F, vocab_size=V, tie_word_embeddings=tied, rope_theta=theta,
        rope_parameters={"rope_type": "default", "rope_theta": theta})


SHAPES = {
    "tiny": _qwen3(3, 128, 4, 2, 32, 256, 512, True, 1e4),
    "esme-214m": _qwen3(30, 768, 12, 4, 64, 2048, 32768, True, 1e4),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 8, 128, 3072, 151936, True, 1e6),
    "qwen3-8b": _qwen3(36, 4096, 32, 8, 128, 12288, 151936, False, 1e6),
}
MODELS = ("demo", *SHAPES)   # demo: SmolLM2-135M-Instruct, real weights and real text


def matrix_params(c: ModelConfig) -> int:
    "Parameters that a decode step reads: all matrices and the head once; the embedding is a gather."
    D, E, H, G = c.hidden_size, c.head_dim, c.n_heads, c.n_kv_heads
    return c.n_layers * (D * (H + 2 * G) * E + H * E * D + 3 * D * c.intermediate_size) + c.vocab_size * D


def kv_token_bytes(c: ModelConfig, itemsize: int = 2) -> int: return 2 * itemsize * c.n_layers * c.n_kv_heads * c.head_dim


def floor_us(c: ModelConfig, batch: int, context: float) -> float: # microseconds a step
    "The least time of a bf16 decode step on an H200: weights and keys and values read once, or the arithmetic."
    weights, kv = 2 * matrix_params(c), batch * (context + 1) * kv_token_bytes(c)
    flops = batch * (2 * matrix_params(c) + 4 * c.n_layers * c.n_heads * c.head_dim * context)
    return max((weights + kv) / BYTES_S, flops / FLOP_S) * 1e6


class _Maker:
    "Makes the tensors of one model, layer by layer."
    scale, share, sharp = 1.0, 0.6, 8.0   # size of an embedding's entries; of all layers' additions to it; spread of the copying layer's scores

    def __init__(self, c: ModelConfig, seed: int, device: torch.device, dtype: torch.dtype):
        self.c, self.device, self.dtype = c, device, dtype
        self.g = torch.Generator(device=device).manual_seed(seed)
        self.angle = 2 * math.pi * self.rand(c.hidden_size // 2)   # what one id turns each pair of entries by

    def rand(self, *shape: int) -> Tensor: return torch.rand(shape, generator=self.g, device=self.device, dtype=torch.float64)
    def randn(self, *shape: int) -> Tensor: return torch.randn(shape, generator=self.g, device=self.device)
    def near_one(self, shape: tuple[int, ...], gain: float = 1.0) -> Tensor: return gain * (1 + 0.1 * self.randn(*shape))

    def embedding(self) -> Tensor:
        "[V, D]: id i + 1 is id i with every pair of entries turned by its own angle."
        first, out = 2 * math.pi * self.rand(len(self.angle)), torch.empty(self.c.vocab_size, self.c.hidden_size, device=self.device, dtype=self.dtype)
        for i in range(0, len(out), 8192):
            a = torch.arange(i, min(i + 8192, len(out)), device=self.device)[:, None] * self.angle + first
            out[i:i + 8192] = (torch.cat((a.cos(), a.sin()), 1) * 2**0.5 * self.scale).to(self.dtype)
        return out

    def next_id(self, x: Tensor) -> Tensor:
        "[D, n] columns turned by one id."
        (a, b), cos, sin = x.chunk(2), self.angle.cos().float()[:, None], self.angle.sin().float()[:, None]
        return torch.cat((a * cos - b * sin, a * sin + b * cos))

    def layer(self, last: bool) -> dict[str, Tensor]:
        "One layer under the names of `layer_shapes`; matrices keep the size of what they read, so the gains set what a layer adds."
        add = self.scale * self.share / (2 * self.c.n_layers)**0.5
        gains = {"o_proj": 2 * add, "down_proj": 3 * add, "q_norm": 2.0, "k_norm": 2.0}
        out = {}
        for name, shape in layer_shapes(self.c).items():
            gain = gains.get(name.split(".")[-2], 1.0)
            out[name] = gain * shape[1]**-0.5 * self.randn(*shape) if len(shape) == 2 else self.near_one(shape, gain)
        if last: self.copy_attention(out)
        return out

    def copy_attention(self, w: dict[str, Tensor]) -> None:
        "Make a layer's attention copy from one place, the same for all heads."
        c, D, E, H, G = self.c, self.c.hidden_size, self.c.head_dim, self.c.n_heads, self.c.n_kv_heads
        for name, heads in (("q", H), ("k", G)):
            key = f"self_attn.{name}_proj.weight"
            w[key] = w[key][:E].repeat(heads, 1)
            if c.qk_norm: w[f"self_attn.{name}_norm.weight"] = self.near_one((E,), self.sharp**0.5)
        basis = torch.linalg.qr(self.randn(D, G * E))[0]                                # [D, G E], orthonormal columns
        strength = 3 * self.scale * D / (0.85 * G * E)                                  # three times what the row's own embedding says
        w["self_attn.v_proj.weight"] = basis.T.contiguous()
        heads = self.next_id(basis).view(D, G, 1, E).expand(D, G, H // G, E).reshape(D, H * E)
        w["self_attn.o_proj.weight"] = heads * (strength * G / H)

    def parts(self) -> Iterator[dict[str, Tensor]]:
        "Tensors in groups of one file each."
        embed = self.embedding()
        ends = {EMBED: embed, NORM: self.near_one((self.c.hidden_size,)).to(self.dtype)}
        yield ends if self.c.tie_embeddings else ends | {HEAD: embed}
        for i in range(self.c.n_layers):
            yield {f"model.layers.{i}.{n}": t.to(self.dtype) for n, t in self.layer(i == self.c.n_layers - 1).items()}


def write_model(name: str, folder: Path, device: str = "cpu", dtype: str = "bfloat16", seed: int = 0) -> Path:
    "Write a model of `MODELS` as a Hugging Face folder, unless it is there already."
    if (folder / "config.json").exists(): return folder
    folder.mkdir(parents=True, exist_ok=True)
    kind = getattr(torch, dtype)
    if name == "demo":
        ckpt = open_checkpoint("demo")
        config, groups = ckpt.hf_config, iter([dict(Weights(ckpt.tensors(), kind, "cpu"))])
    else:
        config = SHAPES[name]
        groups = _Maker(ModelConfig.from_hf(config), seed, torch.device(device), kind).parts()
    where, total = {}, 0
    with ThreadPoolExecutor(4) as pool:
        jobs: list[Any] = []
        for i, group in enumerate(groups):
            file = f"model-{i:05d}.safetensors"
            where |= dict.fromkeys(group, file)
            total += sum(t.nbytes for t in group.values())
            if len(jobs) >= 4: jobs.pop(0).result()           # few groups in memory at a time
            jobs.append(pool.submit(write_safetensors, folder / file, group))
        for j in jobs: j.result()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}))
    (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=1))
    return folder


class Prompts:
    "Distinct prompts of one length, new ones for each seed: random ids, or pieces of real text for the demo model."
    def __init__(self, name: str, vocab_size: int, n: int):
        self.vocab_size, self.n, self.text = vocab_size, n, []
        if name == "demo":
            tok = load_tokenizer(open_checkpoint("demo").tokenizer)
            for file in ("LICENSE", "README.md", "CONTRIBUTING.md"): self.text += tok.encode((ROOT / file).read_text("utf-8"), add_special_tokens=False)

    def __call__(self, count: int, seed: int) -> list[list[int]]:
        rnd = random.Random(seed)
        if not self.text: return [[rnd.randrange(10, self.vocab_size) for _ in range(self.n)] for _ in range(count)]
        return [self.text[s:s + self.n] for s in rnd.sample(range(len(self.text) - self.n), count)]
