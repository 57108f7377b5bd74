"Model files to read, and ways to spoil them."
import json, threading
import numpy as np
import torch
from llminfer import gguf_map
from llminfer.formats import BLOCKS, LoadError, read_safetensors, write_safetensors
from llminfer.loading import load_model, open_checkpoint

IDS = [300, 17, 40, 259, 7, 500, 301, 44, 17, 90, 12, 33]

def hf_logits(folder, ids=IDS, dtype=torch.float32, **kw):
    from transformers import AutoModelForCausalLM
    with torch.inference_mode(): return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **kw)(torch.tensor([ids])).logits[0]

def our_logits(path, ids=IDS, dtype="float64"): return load_model(path, dtype).logits(torch.tensor(ids))

def edit(folder, change):
    "Rewrite the weights of a folder after `change(tensors)`."
    file = folder / "model.safetensors"
    tensors = {n: t.tensor() for n, t in read_safetensors(file).items()}
    change(tensors)
    write_safetensors(file, tensors)
    return tensors

def edit_json(file, **kw): file.write_text(json.dumps(json.loads(file.read_text()) | kw))

def one_line(error, *words):
    text = str(error)
    assert "\n" not in text and len(text) < 500, text
    for w in words: assert w in text, (w, text)

def refuse(path, *words, load=load_model):
    "One clear line with all of `words`, and nothing else; a hang is a failure."
    seen = []
    def work():
        try: seen.append(load(path))
        except BaseException as e: seen.append(e)
    t = threading.Thread(target=work, daemon=True)
    t.start()
    t.join(60)
    assert seen, f"{path}: still reading"
    assert isinstance(seen[0], LoadError), repr(seen[0])
    one_line(seen[0], *words)

def shard(folder):
    "Split a folder's weights over two files and an index."
    tensors = {n: t.tensor() for n, t in read_safetensors(folder / "model.safetensors").items()}
    names, where = sorted(tensors), {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        write_safetensors(folder / file, {n: tensors[n] for n in part})
        where |= {n: file for n in part}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(dict(metadata={}, weight_map=where)))
    return where

def random_blocks(name, n, rng, scale=None):
    "Any bytes [n, bytes a block], but with finite scales; with `scale`, values of about that size around 0 (K formats)."
    raw = rng.integers(0, 256, (n, BLOCKS[name][1]), dtype=np.uint8)
    def put(at, x): raw[:, at:at + 2] = np.asarray(x, dtype=np.float16).reshape(-1, 1).view(np.uint8)
    size = rng.standard_normal(n) if scale is None else np.full(n, scale / (1300 if name == "Q6_K" else 180))
    put(208 if name == "Q6_K" else 0, size)
    if name.endswith(("_1", "4_K", "5_K")): put(2, rng.standard_normal(n) if scale is None else size * (15.5 if name == "Q5_K" else 7.5))
    return raw

def quantized(v, name, rng):
    "(bytes [rows, bytes a row], values) of a matrix in a format; the package cannot write the K formats, so there the values are new."
    from gguf import GGMLQuantizationType as Q, quants
    if not name.endswith("_K"): data = quants.quantize(v, Q[name])
    else: data = random_blocks(name, v.size // 256, rng, v.std()).reshape(len(v), -1)
    return data, np.array(quants.dequantize(data, Q[name])).reshape(v.shape)

def to_gguf(folder, out, quant="F32", extra=(), arch=None, rope_freqs=None):
    "Convert with the gguf package; rows of Q and K interleaved for llama as llama.cpp's converter does. The tensors as they now are."
    from gguf import GGMLQuantizationType as Q, GGUFWriter
    ckpt, back = open_checkpoint(folder), {v: k for k, v in (gguf_map.GGUF_NAMES | gguf_map.GGUF_LAYER_NAMES).items()}
    permuted = ckpt.config.family in ("llama", "mistral")
    arch = arch or ("llama" if permuted else ckpt.config.family)
    c, w, rng = ckpt.config, GGUFWriter(out, arch), np.random.default_rng(0)
    w.add_name("tiny")
    w.add_block_count(c.n_layers), w.add_context_length(c.max_position_embeddings), w.add_embedding_length(c.hidden_size)
    w.add_feed_forward_length(c.intermediate_size), w.add_head_count(c.n_heads), w.add_head_count_kv(c.n_kv_heads)
    w.add_key_length(c.head_dim), w.add_value_length(c.head_dim), w.add_layer_norm_rms_eps(c.norm_eps), w.add_rope_freq_base(c.rope_theta)
    if permuted: w.add_rope_dimension_count(c.head_dim)
    w.add_token_list([f"t{i}" for i in range(c.vocab_size)]), w.add_eos_token_id(2), w.add_eot_token_id(0)
    for key, v in extra: {int: w.add_uint32, float: w.add_float32, str: w.add_string, bool: w.add_bool}[type(v)](key, v)
    state = {}
    for name, t in ckpt.tensors().items():
        v, (stem, end) = t.tensor().numpy(), name.rsplit(".", 1)
        layer = stem.split(".")[2] if "layers" in stem else None
        gname = f"blk.{layer}.{back[stem.split('.', 3)[3]]}.{end}" if layer else f"{back[stem]}.{end}"
        kind = quant if v.ndim == 2 else "F32"
        data, values = quantized(v, kind, rng)
        state[name] = torch.from_numpy(values)
        heads = {"q_proj": c.n_heads, "k_proj": c.n_kv_heads}.get(name.split(".")[-2])
        if heads and permuted: data = data.reshape(heads, 2, c.head_dim // 2, -1).swapaxes(1, 2).reshape(data.shape)
        w.add_tensor(gname, np.ascontiguousarray(data), raw_dtype=Q[kind])
    if rope_freqs is not None: w.add_tensor("rope_freqs.weight", np.asarray(rope_freqs, dtype=np.float32))
    w.write_header_to_file(), w.write_kv_data_to_file(), w.write_tensors_to_file(), w.close()
    return state
