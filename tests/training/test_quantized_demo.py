"""The rounded demo models of the repository: they load, answer, and cost what the page says."""

import json
from pathlib import Path

import pytest
from engine_driver import Driver

from penstock.text.tokenizer import Tokenizer
from penstock.types import SamplingParams
from training.report import PAGE, QUANTIZED, RESULTS, fill, quantized_table
from training.settings import MODELS, RECIPES

ROUNDED = [f"penstock-demo-mini-{ending}" for ending in ("int4", "int8")]
"""Those of the larger model are made by `penstock quantize`: they would be a third of the repository."""
PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize("name", ROUNDED)
def test_they_answer(name: str) -> None:
    folder = MODELS / name
    tokenizer = Tokenizer.load(folder)
    driver = Driver(folder, dtype="auto", kernels="auto", max_model_len=256)
    sampling = SamplingParams(temperature=0.0, max_tokens=16, stop_token_ids=tokenizer.eos_ids)
    (answer,) = driver.ask([tokenizer.encode(PROMPT)], [sampling])
    assert tokenizer.decode(answer.token_ids).strip() == "The capital of France is Paris."


def test_each_takes_less_room_than_the_dense_one() -> None:
    four, eight = (size(MODELS / name) for name in ROUNDED)
    assert 0 < four < eight < size(RECIPES["penstock-demo-mini"].folder)


def test_the_page_has_the_last_measurement_and_no_format_loses_a_point() -> None:
    found = json.loads(max(RESULTS.glob(QUANTIZED)).read_text())["models"]
    text = PAGE.read_text()
    assert fill(text, "quantized", quantized_table(found)) == text, "python -m training.report"
    for model in found.values():
        assert all(each["mean_points_lost"] < 1 for each in model.values() if "mean_points_lost" in each)
