"""transformers as the judge: tiny models of every family with given tensors, and its own Llama with weights that its side reads and dequantises by itself."""
import re
from typing import Any, Mapping
import numpy as np
import torch


def hf_config(arch: str = "Llama", heads: tuple[int, int] = (4, 2), tied: bool = False, rope: dict | None = None, extra: dict | None = None, length: int = 0) -> Any:
    "A tiny configuration, 3 layers; `arch` is Llama, Mistral, Qwen2, Qwen3 or OPT. OPT takes the first of `heads`."
    import transformers
    kw: dict[str, Any] = dict(vocab_size=97, hidden_size=heads[0] * 8, num_hidden_layers=3, num_attention_heads=heads[0], max_position_embeddings=2048,
        tie_word_embeddings=tied, architectures=[f"{arch}ForCausalLM"])
    kw |= dict(ffn_dim=48) if arch == "OPT" else dict(intermediate_size=48, num_key_value_heads=heads[1])
    if arch == "Qwen3": kw["head_dim"] = 16
    if rope: kw["rope_scaling"] = dict(rope)
    return getattr(transformers, f"{arch}Config")(**{**kw, **(extra or {})})


def hf_model(c: Any, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> Any:
    "transformers' model of a configuration, with these tensors and no others."
    import transformers
    hf = getattr(transformers, c.architectures[0])(c).eval()
    missing, unexpected = hf.load_state_dict(dict(tensors), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    hf.tie_weights()
    return hf.to(dtype)


def gguf_state_dict(path, n_heads, n_kv_heads):
    "HF-named fp32 tensors of a llama GGUF, read and dequantised by the `gguf` package; its Q/K row order undone."
    from gguf import GGUFReader, dequantize
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
             "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
             "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
    out = {}
    for t in GGUFReader(path).tensors:
        w = torch.from_numpy(np.array(dequantize(t.data, t.tensor_type), np.float32))
        m = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", t.name)
        layer, kind = m[1], m[2]
        if kind in ("attn_q", "attn_k"):
            h = n_heads if kind == "attn_q" else n_kv_heads
            w = w.reshape(h, w.shape[0] // h // 2, 2, w.shape[1]).transpose(1, 2).reshape(w.shape)
        out[f"model.layers.{layer}.{names[kind]}.weight" if layer else f"{names[kind]}.weight"] = w
    return out


def hf_from_checkpoint(ckpt, dtype=torch.float32, device="cpu", own_reader=False):
    "transformers' model of an opened checkpoint (the demo GGUF, or a folder); `own_reader` where the gguf package is missing (a GPU machine)."
    import transformers
    if ckpt.format != "gguf": return transformers.AutoModelForCausalLM.from_pretrained(ckpt.path, dtype=dtype).eval()
    c = ckpt.config
    cfg = transformers.LlamaConfig(vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, num_hidden_layers=c.n_layers,
        num_attention_heads=c.n_heads, num_key_value_heads=c.n_kv_heads, head_dim=c.head_dim, rms_norm_eps=c.norm_eps, max_position_embeddings=c.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta}, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2)
    if own_reader:
        from llminfer.loading import Weights
        sd = dict(Weights(ckpt.tensors(), torch.float32, "cpu"))
    else: sd = gguf_state_dict(str(ckpt.path), c.n_heads, c.n_kv_heads)
    sd.setdefault("lm_head.weight", sd["model.embed_tokens.weight"])
    with torch.device("meta"): m = transformers.LlamaForCausalLM(cfg)
    m.load_state_dict({k: v.to(dtype) for k, v in sd.items()}, assign=True)
    m.model.rotary_emb = type(m.model.rotary_emb)(cfg)
    m.tie_weights()
    return m.eval().to(device)
