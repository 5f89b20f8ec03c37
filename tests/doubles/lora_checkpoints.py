"""Adapters for tiny models in PEFT's layout, with random matrices that matter."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

LINEARS = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj",
)  # fmt: skip


def adapter_modules(model: PreTrainedModel, targets: tuple[str, ...] = LINEARS) -> dict[str, nn.Linear]:
    """The linears of a model's decoder that an adapter may change, by their path."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and path.rpartition(".")[2] in targets and "vision" not in path
    }


def write_adapter(
    directory: Path,
    model: PreTrainedModel,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    targets: tuple[str, ...] = LINEARS,
    dtype: torch.dtype = torch.float32,
    config: str = "",
) -> Path:
    """A PEFT directory. `config` is more of its JSON."""
    directory.mkdir(parents=True)
    random = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for path, module in adapter_modules(model, targets).items():
        prefix = f"base_model.model.{path}"
        a = torch.randn(rank, module.in_features, generator=random) * 0.2
        b = torch.randn(module.out_features, rank, generator=random) * 0.2
        tensors[f"{prefix}.lora_A.weight"] = a.to(dtype)
        tensors[f"{prefix}.lora_B.weight"] = b.to(dtype)
    save_file(tensors, directory / "adapter_model.safetensors")
    names = ", ".join(f'"{name}"' for name in targets)
    more = f", {config}" if config else ""
    (directory / "adapter_config.json").write_text(
        f'{{"peft_type": "LORA", "r": {rank}, "lora_alpha": {alpha}, "bias": "none", '
        f'"target_modules": [{names}]{more}}}'
    )
    return directory


def write_adapter_for(directory: Path, checkpoint: Path, *, rank: int = 8, seed: int = 0) -> Path:
    """A PEFT directory for all linears of a checkpoint in one file, strong enough to change its answers."""
    directory.mkdir(parents=True)
    random = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            (out, inner), draw = weight.shape, random
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, inner, generator=draw) * 0.3
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(out, rank, generator=draw) * 0.3
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(
        f'{{"peft_type": "LORA", "r": {rank}, "lora_alpha": {rank}, "bias": "none"}}'
    )
    return directory
