"""A gpt-oss checkpoint with its experts in MXFP4, in the layout that OpenAI publishes."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
NOT_ROUNDED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def round_experts(folder: Path) -> None:
    """Round the experts `[E, K, N]` of a folder that `save_pretrained` wrote; everything else becomes bfloat16."""
    path, config = folder / "model.safetensors", folder / "config.json"
    found: dict[str, Tensor] = {}
    for name, tensor in load_file(path).items():
        if name.endswith((".gate_up_proj", ".down_proj")):
            found[f"{name}_blocks"], found[f"{name}_scales"] = rounded(tensor.transpose(1, 2))
        else:
            found[name] = tensor.to(torch.bfloat16)
    save_file(found, path, {"format": "pt"})
    written = json.loads(config.read_text(encoding="utf-8"))
    written["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": NOT_ROUNDED}
    config.write_text(json.dumps(written), encoding="utf-8")


def rounded(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Turn `[E, N, K]` into blocks `[E, N, K / 32, 16]` and scales `[E, N, K / 32]`, uint8 both."""
    in_blocks = matrices.float().reshape(*matrices.shape[:-1], -1, 32)
    powers = torch.floor(torch.log2(in_blocks.abs().amax(-1, keepdim=True))) - 2
    scaled = in_blocks / torch.exp2(powers)
    levels = (scaled.abs()[..., None] - LEVELS).abs().argmin(-1) + 8 * (scaled < 0)
    packed = levels[..., 0::2] | levels[..., 1::2] << 4
    return packed.to(torch.uint8).contiguous(), (powers[..., 0] + 127).to(torch.uint8).contiguous()
