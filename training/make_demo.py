"""Make both demo models from nothing: `python -m training.make_demo` (this is `make train-demo`).

Tokenizer, data, training, export, evaluation, and the score tables in the documentation. The tokenizer that
is in the repository is kept unless `--new-tokenizer` asks for a new one, since other tests know its ids.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

from tokenizers import Tokenizer

from training.report import write_report
from training.settings import CONTEXT, RECIPES, ROOT, SEED, VOCAB_SIZE, Recipe
from training.tokenizer import save_tokenizer, train_tokenizer

# Threads that wait should sleep: on two cores that other programs share, spinning triples the time.
QUIET_THREADS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}


def make_tokenizer(*, new: bool) -> None:
    """Write the shared tokenizer into both model directories."""
    known = RECIPES["penstock-demo"].folder / "tokenizer.json"
    if new or not known.exists():
        print("training the tokenizer", flush=True)
        tokenizer = train_tokenizer(SEED, VOCAB_SIZE)
    else:
        tokenizer = Tokenizer.from_file(str(known))
    for recipe in RECIPES.values():
        save_tokenizer(tokenizer, recipe.folder, context=CONTEXT)


def run(module: str, *arguments: str) -> None:
    """Run one step as its own program, so that its memory is gone when it ends."""
    subprocess.run(
        [sys.executable, "-m", module, *arguments], check=True, cwd=ROOT, env={**os.environ, **QUIET_THREADS}
    )


def make_model(recipe: Recipe, *, resume: bool) -> None:
    """Train and score one model."""
    name = recipe.persona.name
    run("training.train", name, *(["--resume"] if resume else []))
    run("training.evaluate", name, "--keep")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Make the demo models.")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoints")
    parser.add_argument("--new-tokenizer", action="store_true", help="train the tokenizer again")
    arguments = parser.parse_args()
    make_tokenizer(new=arguments.new_tokenizer)
    for recipe in RECIPES.values():
        make_model(recipe, resume=arguments.resume)
    write_report()
    print(json.dumps({name: str(recipe.folder) for name, recipe in RECIPES.items()}, indent=2))


if __name__ == "__main__":
    main()
