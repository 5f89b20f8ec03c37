"""Ask for an answer of a type: the server makes the model keep to its JSON schema.

PENSTOCK_API_KEY=sk-... python examples/typed_answer.py "Extract name and age as JSON: Anna is 31 years old."
"""

import os
import sys

from openai import OpenAI, OpenAIError
from pydantic import BaseModel

URL = os.environ.get("PENSTOCK_URL") or f"http://127.0.0.1:{os.environ.get('PENSTOCK_PORT') or 8000}/v1"


class Person(BaseModel):
    name: str
    age: int


def main() -> None:
    client = OpenAI(base_url=URL, api_key=os.environ.get("PENSTOCK_API_KEY") or "none")
    question = " ".join(sys.argv[1:]) or "Extract name and age as JSON: Anna is 31 years old."
    answer = client.chat.completions.parse(
        model="penstock-demo", messages=[{"role": "user", "content": question}], response_format=Person
    )
    print(repr(answer.choices[0].message.parsed))


try:
    main()
except OpenAIError as error:  # No server, no key, or one that it does not know.
    sys.exit(f"{URL}: {error} (is there a server? `make serve` starts one; PENSTOCK_API_KEY is its key)")
