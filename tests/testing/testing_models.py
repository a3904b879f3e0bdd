"""Small random models in Hugging Face folders. torch is imported inside functions, so that collecting works
without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB = 97


def model_of(arch: str, tie: bool, folder: Path, dtype: str = "bfloat16") -> Any:
    import torch
    import transformers as hf

    hf.utils.logging.disable_progress_bar()
    torch.manual_seed(3)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tie,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if arch == "qwen2":
        sizes["head_dim"] = 12  # hidden / heads: Qwen2 has no other
    if arch == "qwen3_moe":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}[arch]
    model = getattr(hf, f"{name}ForCausalLM")(getattr(hf, f"{name}Config")(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder
