"""A small Llama with seeded random weights, and a byte-level tokenizer, made on the spot: nothing is downloaded.

Weights are scaled so that attention matters: with the usual small ones every prompt would give nearly the same tokens,
whatever its KV holds.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "medium": {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
}
"""KV of a token in float32: 2 KiB and 32 KiB."""
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "float32",
    "bos_token_id": 257,
    "eos_token_id": 256,
}
VERSION = 1
"""Goes up when the same seed would give another model."""
_SPECIAL = ("<eos>", "<bos>", "<pad>")
_GAIN = {"q_proj": 2.0, "k_proj": 2.0, "v_proj": 1.0, "o_proj": 1.5, "embed_tokens": 0.5}


def cached(folder: Path, seed: int = 0, size: str = "tiny") -> Path:
    """The folder of the model of a seed and size below `folder`, made if it is not there."""
    path = folder / f"{size}-llama-v{VERSION}-seed{seed}"
    if not (path / "model.safetensors").exists():
        folder.mkdir(parents=True, exist_ok=True)
        # Whoever comes at the same time must not find half a model.
        draft = Path(tempfile.mkdtemp(prefix=".tiny-llama-", dir=folder))
        try:
            make(draft, seed, SIZES[size])
            os.replace(draft, path) if not path.exists() else shutil.rmtree(draft)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    return path


def make(folder: Path, seed: int, sizes: dict[str, int]) -> None:
    """Write config, weights and tokenizer into a folder."""
    from safetensors.torch import save_file

    (folder / "config.json").write_text(json.dumps(CONFIG | sizes, indent=1))
    save_file(_weights(seed, sizes), str(folder / "model.safetensors"), metadata={"format": "pt"})
    _write_tokenizer(folder)


def _weights(seed: int, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    """Normal, with a standard deviation of gain / sqrt(inputs), in float32."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, vocabulary = sizes["hidden_size"], sizes["intermediate_size"], CONFIG["vocab_size"]
    heads = sizes["num_attention_heads"] * sizes["head_dim"]
    kv_heads = sizes["num_key_value_heads"] * sizes["head_dim"]
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "lm_head.weight": (vocabulary, hidden)}
    for layer in range(sizes["num_hidden_layers"]):
        here = f"model.layers.{layer}"
        shapes |= {
            f"{here}.self_attn.q_proj.weight": (heads, hidden),
            f"{here}.self_attn.k_proj.weight": (kv_heads, hidden),
            f"{here}.self_attn.v_proj.weight": (kv_heads, hidden),
            f"{here}.self_attn.o_proj.weight": (hidden, heads),
            f"{here}.mlp.gate_proj.weight": (inner, hidden),
            f"{here}.mlp.up_proj.weight": (inner, hidden),
            f"{here}.mlp.down_proj.weight": (hidden, inner),
        }
    found = {}
    for name, shape in shapes.items():
        gain = next((gain for part, gain in _GAIN.items() if part in name), 1.0)
        scale = gain if "embed_tokens" in name else gain / shape[1] ** 0.5
        found[name] = torch.randn(shape, generator=generator) * scale
    norms = ["model.norm.weight"]
    for layer in range(sizes["num_hidden_layers"]):
        norms += [f"model.layers.{layer}.{norm}.weight" for norm in ("input_layernorm", "post_attention_layernorm")]
    return found | {name: torch.ones(hidden) for name in norms}


def _write_tokenizer(folder: Path) -> None:
    """Byte-level BPE without merges: ids 0 to 255 are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    for number in range(len(letters) + len(_SPECIAL), CONFIG["vocab_size"]):
        vocabulary[f"<unused{number}>"] = number
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | _special_ids(len(letters)), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "bos_token": "<bos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def _special_ids(first: int) -> dict[str, int]:
    return {name: first + number for number, name in enumerate(_SPECIAL)}


if __name__ == "__main__":
    print(cached(Path(sys.argv[1]), size=sys.argv[2] if len(sys.argv) > 2 else "tiny"))
