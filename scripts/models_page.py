"""Writes the table of docs/models.md: every family and every form of weights that the engine loads.

`make format` runs it; tests/engine/test_published_formats.py compares, and loads a checkpoint for each cell.
"""

from pathlib import Path

from penstock.models.gguf_config import ARCHITECTURES
from penstock.models.registry import FAMILIES

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- written by scripts/models_page.py -->\n", "<!-- end -->\n"
FORMS = {
    "dense": ("bf16, fp16, fp32", "as it is"),
    "gptq": ("GPTQ 4 bit", "int4"),
    "gptq-8bit": ("GPTQ 8 bit", "bf16"),
    "awq": ("AWQ", "int4"),
    "packed-int4": ("compressed-tensors int4", "int4"),
    "packed-int8": ("compressed-tensors int8, packed", "bf16"),
    "w8a8": ("compressed-tensors W8A8", "int8, else bf16"),
    "fp8-tensor": ("FP8 per tensor", "bf16"),
    "fp8-channel": ("FP8 per channel", "bf16"),
    "fp8-block": ("FP8 in blocks", "bf16"),
}
"""By the name that the tests give a form: how it is published, and what the CPU's kernels multiply with."""

GGUF = {
    "gguf-f32": ("GGUF F32, F16, BF16", "as it is"),
    "gguf-q8_0": ("GGUF Q8_0", "bf16"),
    "gguf-q4_0": ("GGUF Q4_0", "int4"),
    "gguf-q4_1": ("GGUF Q4_0 with Q4_1", "int4"),
    "gguf-q4_k_m": ("GGUF Q4_K_M (Q4_K and Q6_K)", "int4 where a product is Q4_K as a whole, else bf16"),
    "gguf-q4_k_m-odd": ("GGUF Q4_K_M of rows that 256 does not divide (Q5_0, Q5_1, Q8_0)", "bf16"),
    "gguf-q5_k_m": ("GGUF Q5_K_M (Q5_K and Q6_K)", "bf16"),
    "gguf-q6_k": ("GGUF Q6_K", "bf16"),
}
"""The same for GGUF, whose architectures have other names: tests/engine/test_gguf.py loads each."""


def table() -> str:
    """Forms as rows, families as columns: each cell loads."""
    lines = ["| published as | computed on the CPU as |", "|---|---|"]
    lines += [f"| {published} | {computed} |" for published, computed in (FORMS | GGUF).values()]
    lines += ["", "Each of them for each of these architectures; a GGUF file calls them otherwise:", ""]
    lines += ["| architecture | `general.architecture` of GGUF |", "|---|---|"]
    lines += [f"| `{name}` | `{gguf_name(name)}` |" for name in sorted(FAMILIES)]
    return "\n".join(lines) + "\n"


def gguf_name(family: str) -> str:
    """llama.cpp's name of it: those that differ from Llama in nothing that it computes have one name."""
    if family == "MistralForCausalLM":
        return "llama"
    text = family.replace("ConditionalGeneration", "CausalLM").replace("Mistral3For", "MistralFor")
    return {ours: theirs for theirs, ours in ARCHITECTURES.items()}.get(text, "llama")


def page(text: str) -> str:
    """The page with the table as it is now."""
    head, _, rest = text.partition(BEGIN)
    return head + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
