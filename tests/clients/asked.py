"""What every client asks the demo model, which knows such questions."""

import json
import os

from pydantic import BaseModel

MODEL = "penstock-demo"
ANNA = "Extract name and age as JSON: Anna is 31 years old and lives in Paris."
WEATHER = "What is the weather in Paris?"
URL, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def weather(city: str) -> str:
    """Get the current weather in a city."""
    return json.dumps({"temperature": 19, "conditions": "sunny"} if city == "Paris" else {"error": "unknown"})


def check_answer(text: str) -> None:
    """The model says what the tool said."""
    assert "Paris" in text, text
    assert "sunny" in text, text
    assert "19" in text, text
