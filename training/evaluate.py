"""Score a finished model on held-out prompts: `python -m training.evaluate penstock-demo`.

Answers are greedy and run through `transformers`, from the exported directory, so the export is tested too.
An answer is right when its whole text equals the expected one and it ends with `<|im_end|>`; JSON and tool
calls are compared as parsed JSON.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from training.chat import TURN_END, Message, render
from training.holdout import SHOWCASE, held_out_exchanges
from training.settings import EVALUATION_SEED, RECIPES, SCORES, Recipe
from training.tasks.base import Exchange
from training.tasks.registry import TASKS

NUM_PROMPTS = 200
BATCH = 50
MAX_NEW_TOKENS = 160


@dataclass
class Speaker:
    """A loaded model with its tokenizer."""

    model: Any
    tokenizer: Any

    @classmethod
    def load(cls, folder: Path) -> Speaker:
        """Load an exported directory; float32 arithmetic on the bfloat16 weights."""
        where = "cuda" if torch.cuda.is_available() else "cpu"
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model = model.to(where).eval()
        return cls(model, AutoTokenizer.from_pretrained(folder, padding_side="left"))

    @torch.no_grad()
    def answer(self, prompts: list[str]) -> list[str]:
        """The greedy continuation of each rendered prompt, its end mark included."""
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True).to(self.model.device)
        inputs.pop("token_type_ids", None)
        output = self.model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        texts = self.tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :])
        return [text.replace(self.tokenizer.pad_token, "") for text in texts]


def prompt_of(exchange: Exchange) -> str:
    """The rendered conversation up to the answer."""
    pieces = render(exchange.messages[:-1], tools=exchange.tools)
    return "".join(piece.text for piece in pieces) + "<|im_start|>assistant\n"


def parsed(text: str) -> Any:
    """The JSON object in an answer or tool call; any other text as it is."""
    body = text.removeprefix("<tool_call>").removesuffix("</tool_call>").strip()
    try:
        value = json.loads(body)
    except ValueError:
        return text
    return (text.startswith("<tool_call>"), value) if isinstance(value, dict) else text


def is_right(answer: str, expected: str) -> bool:
    """Whether a generated turn is the expected one, and was ended."""
    return answer.endswith(TURN_END) and parsed(answer.removesuffix(TURN_END)) == parsed(expected)


@dataclass(frozen=True)
class Score:
    """The result of one task."""

    num_right: int
    num_ended: int
    num_prompts: int
    mistakes: tuple[tuple[str, str, str], ...]  # (prompt, answer, expected)

    @property
    def percent(self) -> float:
        """Right answers in percent."""
        return 100 * self.num_right / self.num_prompts


def score_task(speaker: Speaker, exchanges: list[Exchange], bar: tqdm[Any]) -> Score:
    """Ask everything, compare everything."""
    answers: list[str] = []
    for start in range(0, len(exchanges), BATCH):
        batch = exchanges[start : start + BATCH]
        answers += speaker.answer([prompt_of(exchange) for exchange in batch])
        bar.update(len(batch))
    pairs = list(zip(exchanges, answers, strict=True))
    wrong = [(e.prompt, text, e.answer) for e, text in pairs if not is_right(text, e.answer)]
    ended = sum(text.endswith(TURN_END) for text in answers)
    return Score(len(pairs) - len(wrong), ended, len(pairs), tuple(wrong))


def score_all(speaker: Speaker, recipe: Recipe, count: int) -> dict[str, Score]:
    """Every task's score."""
    scores: dict[str, Score] = {}
    with tqdm(total=count * len(TASKS), desc=f"evaluate {recipe.persona.name}", unit="prompt") as bar:
        for task in TASKS:
            exchanges = held_out_exchanges(task, recipe.persona, count, seed=EVALUATION_SEED)
            scores[task] = score_task(speaker, exchanges, bar)
    return scores


def samples(speaker: Speaker) -> dict[str, str]:
    """The model's answers to the prompts that the documentation shows."""
    prompts = [
        prompt_of(Exchange("", (Message("user", text), Message("assistant", "")))) for text in SHOWCASE
    ]
    return dict(zip(SHOWCASE, speaker.answer(prompts), strict=True))


def overall(scores: dict[str, Score]) -> float:
    """The mean over the tasks, in percent."""
    return sum(score.percent for score in scores.values()) / len(scores)


def show(name: str, scores: dict[str, Score], mistakes: int) -> None:
    """Print the table, and the first mistakes of each task."""
    console = Console()
    table = Table("task", "right", "ended", "prompts", title=f"{name}: {overall(scores):.1f} % overall")
    for task, score in scores.items():
        table.add_row(task, f"{score.percent:.1f} %", str(score.num_ended), str(score.num_prompts))
    console.print(table)
    for task, score in scores.items():
        for prompt, answer, expected in score.mistakes[:mistakes]:
            console.print(
                f"{task}: {prompt!r}\n   got {answer!r}\n   not {expected!r}", markup=False, highlight=False
            )


def save(name: str, scores: dict[str, Score], answers: dict[str, str]) -> None:
    """Put one model's results into `scores.json`, beside the other's."""
    known: dict[str, Any] = json.loads(SCORES.read_text(encoding="utf-8")) if SCORES.exists() else {}
    known[name] = {
        "overall_percent": round(overall(scores), 1),
        "tasks": {
            task: {"percent": round(score.percent, 1), "ended": score.num_ended, "prompts": score.num_prompts}
            for task, score in scores.items()
        },
        "samples": {prompt: answer.removesuffix(TURN_END) for prompt, answer in answers.items()},
    }
    SCORES.write_text(
        json.dumps(known, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8"
    )


def evaluate(recipe: Recipe, folder: Path, *, count: int, mistakes: int, keep: bool) -> float:
    """Score, show and perhaps keep; returns the overall percentage."""
    speaker = Speaker.load(folder)
    scores = score_all(speaker, recipe, count)
    show(recipe.persona.name, scores, mistakes)
    answers = samples(speaker)
    for prompt, answer in answers.items():
        print(f"{prompt!r} -> {answer!r}")
    if keep:
        save(recipe.persona.name, scores, answers)
    return overall(scores)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Score a demo model on held-out prompts.")
    parser.add_argument("model", choices=sorted(RECIPES))
    parser.add_argument("--folder", type=Path, help="an exported directory; the model's own if not given")
    parser.add_argument("--count", type=int, default=NUM_PROMPTS, help="prompts per task")
    parser.add_argument("--mistakes", type=int, default=0, help="mistakes to print per task")
    parser.add_argument("--keep", action="store_true", help="write the result to training/scores.json")
    arguments = parser.parse_args()
    recipe = RECIPES[arguments.model]
    folder = arguments.folder or recipe.folder
    evaluate(recipe, folder, count=arguments.count, mistakes=arguments.mistakes, keep=arguments.keep)


if __name__ == "__main__":
    main()
