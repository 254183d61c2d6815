"""Tiny models with seeded random weights, made where they are needed: nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 128, 4, 4, 2, 32, 512
WINDOW = 64
"""Tokens that the windowed layers of `gemma` look back."""
LATENT, ROPE = 512, 64
"""Elements of a latent of `deepseek`, and of its part with positions."""

COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Weights:
    """Random tensors by name, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.tensors = {
            "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=self._generator),
            "model.norm.weight": torch.ones(HIDDEN),
        }
        self.matrix("lm_head", VOCAB, HIDDEN)
        for layer in range(LAYERS):
            for norm in ("input_layernorm", "post_attention_layernorm"):
                self.tensors[f"model.layers.{layer}.{norm}.weight"] = torch.ones(HIDDEN)
            self.matrix(f"model.layers.{layer}.mlp.gate_proj", 2 * HIDDEN, HIDDEN)
            self.matrix(f"model.layers.{layer}.mlp.up_proj", 2 * HIDDEN, HIDDEN)
            self.matrix(f"model.layers.{layer}.mlp.down_proj", HIDDEN, 2 * HIDDEN)

    def matrix(self, name: str, rows: int, columns: int, scale: float = 1.0) -> None:
        """Add a projection. Those of attention are scaled up, so that tokens depend on what attention reads."""
        self.tensors[f"{name}.weight"] = torch.randn(rows, columns, generator=self._generator) / columns**0.5 * scale

    def save(self, folder: Path, config: dict[str, Any]) -> Path:
        """Write the model into a folder, and give the folder."""
        save_file(self.tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(COMMON | config))
        return folder


def llama(folder: Path, kv_heads: int = KV_HEADS) -> Path:
    """A Llama: one KV cache group."""
    weights = _grouped_query(kv_heads)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    return weights.save(folder, config | {"num_key_value_heads": kv_heads, "head_dim": HEAD_DIM})


def gemma(folder: Path) -> Path:
    """A Gemma 3 whose first and third layers look back over a window: two KV cache groups."""
    weights = _grouped_query(KV_HEADS)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for norm in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
            weights.tensors[f"{at}.{norm}.weight"] = torch.zeros(HIDDEN)
        for norm in ("q_norm", "k_norm"):
            weights.tensors[f"{at}.self_attn.{norm}.weight"] = torch.zeros(HEAD_DIM)
    config = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": HEAD_DIM,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
        "rope_local_base_freq": 10000.0,
    }
    return weights.save(folder, config)


def deepseek(folder: Path) -> Path:
    """A DeepSeek V2 without experts: latents (MLA), which every rank holds whole."""
    weights, values = Weights(seed=7), HEAD_DIM
    for layer in range(LAYERS):
        at = f"model.layers.{layer}.self_attn"
        weights.tensors[f"{at}.kv_a_layernorm.weight"] = torch.ones(LATENT)
        weights.matrix(f"{at}.q_proj", HEADS * (HEAD_DIM + ROPE), HIDDEN, 3)
        weights.matrix(f"{at}.kv_a_proj_with_mqa", LATENT + ROPE, HIDDEN, 3)
        weights.matrix(f"{at}.kv_b_proj", HEADS * (HEAD_DIM + values), LATENT, 3)
        weights.matrix(f"{at}.o_proj", HIDDEN, HEADS * values, 3)
    config = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": HEADS,
        "q_lora_rank": None,
        "kv_lora_rank": LATENT,
        "qk_rope_head_dim": ROPE,
        "qk_nope_head_dim": HEAD_DIM,
        "v_head_dim": values,
        "first_k_dense_replace": LAYERS,
        "moe_intermediate_size": HIDDEN,
    }
    return weights.save(folder, config)


def _grouped_query(kv_heads: int) -> Weights:
    weights = Weights(seed=7)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}.self_attn"
        weights.matrix(f"{at}.q_proj", HEADS * HEAD_DIM, HIDDEN, 3)
        weights.matrix(f"{at}.k_proj", kv_heads * HEAD_DIM, HIDDEN, 3)
        weights.matrix(f"{at}.v_proj", kv_heads * HEAD_DIM, HIDDEN, 3)
        weights.matrix(f"{at}.o_proj", HIDDEN, HEADS * HEAD_DIM, 3)
    return weights
