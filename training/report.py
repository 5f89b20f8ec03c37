"""Write what the evaluation found into the documentation: `python -m training.report`.

Fills the part of `docs/demo-models.md` between its markers, and each model's card, from `scores.json`, from
the facts that training left in `training/facts.json`, and from the last figures of
`training/quantized.py`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from textwrap import indent
from typing import Any

from training.holdout import SHOWCASE
from training.settings import FACTS, RECIPES, ROOT, SCORES, Recipe
from training.tasks.registry import TASKS

PAGE = ROOT / "docs" / "demo-models.md"
RESULTS = ROOT / "docs" / "results"
QUANTIZED = "*-quantized-demo.json"
"""Its newest is the one that counts."""
CARD = """\
# {name}

A chat model with {parameters:,} parameters that the Penstock project trained from scratch, as a small thing \
to
serve in demos and tests. Not for any other use: it knows a few capitals and small sums, and little else.

- Architecture: Qwen3 (`Qwen3ForCausalLM`), {layers} layers, hidden size {hidden}, {heads} heads over \
{kv_heads} KV
  heads, {vocab} tokens, context {context} (trained on up to 2,048), bfloat16.
- Data: conversations written by the scripts in `training/`, and the text of Python's standard library.
- Held-out prompts answered exactly: **{overall} %** on average over {num_tasks} kinds of task; the table by \
task,
  and what the model cannot do, are in `docs/demo-models.md`.
- Licence: Apache-2.0, like the rest of Penstock.
"""


def read(path: Path) -> dict[str, Any]:
    """A JSON file, or nothing yet."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def score_table(scores: dict[str, Any]) -> str:
    """One line per task, one column per model."""
    names = [name for name in RECIPES if name in scores]
    lines = ["| task | " + " | ".join(f"`{name}`" for name in names) + " |", "|---" * (len(names) + 1) + "|"]
    for task in TASKS:
        cells = [f"{scores[name]['tasks'][task]['percent']:.1f} %" for name in names]
        lines.append(f"| {task} | " + " | ".join(cells) + " |")
    means = [f"**{scores[name]['overall_percent']:.1f} %**" for name in names]
    return "\n".join([*lines, "| **mean over tasks** | " + " | ".join(means) + " |"])


def facts_table(facts: dict[str, Any]) -> str:
    """The facts of the training."""
    lines = [
        "| model | parameters | tokens | steps | wall time | CPU time | tokens/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, fact in facts.items():
        lines.append(
            f"| `{name}` | {fact['parameters']:,} | {fact['tokens'] / 1e6:.1f} M | {fact['steps']:,} | "
            f"{fact['wall_s'] / 60:.0f} min | {fact['cpu_s'] / 60:.0f} min | {fact['tokens_per_s']:,} |"
        )
    return "\n".join(lines)


def samples_text(scores: dict[str, Any]) -> str:
    """The showcase prompts with each model's answer."""
    blocks: list[str] = []
    for name in (name for name in RECIPES if name in scores):
        answers: dict[str, str] = scores[name]["samples"]
        lines = [prompt + "\n" + indent(answers[prompt], "    ") for prompt in SHOWCASE]
        blocks.append(f"`{name}`:\n\n```text\n" + "\n".join(lines) + "\n```")
    return "\n\n".join(blocks)


def quantized_table(models: dict[str, Any]) -> str:
    """The cost of rounding: points lost by task, with their 95 % intervals, and how large the files are."""
    blocks: list[str] = []
    for name, found in models.items():
        dense, prompts = found["bf16"], found["prompts"]
        formats = [each for each in found if each not in ("bf16", "prompts")]
        count = next(iter(prompts.values()))
        assert all(each == count for each in prompts.values())
        lines = [
            f"| `{name}`, {count} prompts a task | bf16 | "
            + " | ".join(f"`{each}`" for each in formats)
            + " |",
            "|---" * (len(formats) + 2) + "|",
            f"| size | {dense['bytes'] / 1e6:.1f} MB | "
            + " | ".join(f"{found[each]['bytes'] / 1e6:.1f} MB" for each in formats)
            + " |",
        ]
        for task, percent in dense["percent"].items():
            lost = [found[each]["points_lost"][task] for each in formats]
            cells = [f"{signed(each['points'])} ± {each['ci95']:.1f}" for each in lost]
            lines.append(f"| {task} | {percent:.1f} % | " + " | ".join(cells) + " |")
        means = [
            f"**{signed(found[each]['mean_points_lost'], 2)} ± {found[each]['mean_ci95']:.2f}**"
            for each in formats
        ]
        mean = sum(dense["percent"].values()) / len(dense["percent"])
        blocks.append(
            "\n".join([*lines, f"| **mean over tasks** | **{mean:.1f} %** | " + " | ".join(means) + " |"])
        )
    return "\n\n".join(blocks)


def signed(lost: float, digits: int = 1) -> str:
    """Points that were lost, as a change."""
    return f"{0.0 - lost:+.{digits}f}" if round(lost, digits) else f"{0:.{digits}f}"


def fill(text: str, section: str, content: str) -> str:
    """`text` with the part between the section's markers replaced."""
    begin, end = f"<!-- {section}: written by training/report.py -->", f"<!-- end of {section} -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    return pattern.sub(lambda _: f"{begin}\n{content}\n{end}", text)


def card(recipe: Recipe, fact: dict[str, Any], score: dict[str, Any]) -> str:
    """The model's README."""
    shape = recipe.shape
    return CARD.format(
        name=recipe.persona.name,
        parameters=fact["parameters"],
        layers=shape.num_hidden_layers,
        hidden=shape.hidden_size,
        heads=shape.num_attention_heads,
        kv_heads=shape.num_key_value_heads,
        vocab=shape.vocab_size,
        context=shape.max_position_embeddings,
        overall=score["overall_percent"],
        num_tasks=len(score["tasks"]),
    )


def write_report() -> None:
    """Update the page and the cards."""
    scores, facts = read(SCORES), read(FACTS)
    text = PAGE.read_text(encoding="utf-8")
    text = fill(text, "scores", score_table(scores))
    text = fill(text, "training", facts_table({name: facts[name] for name in RECIPES if name in facts}))
    text = fill(text, "quantized", quantized_table(read(max(RESULTS.glob(QUANTIZED)))["models"]))
    PAGE.write_text(fill(text, "samples", samples_text(scores)), encoding="utf-8")
    for name, recipe in RECIPES.items():
        if name in scores and name in facts:
            (recipe.folder / "README.md").write_text(
                card(recipe, facts[name], scores[name]), encoding="utf-8"
            )


if __name__ == "__main__":
    write_report()
