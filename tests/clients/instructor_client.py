"""`instructor`: a typed answer in each of its modes that a server has to help with."""

import instructor
from asked import ANNA, MODEL, Person
from openai import OpenAI


def main() -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(OpenAI(), mode=mode)
        found = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": ANNA}], response_model=Person, max_retries=0
        )
        assert isinstance(found, Person), (mode, found)
        assert found.age >= 0
    parts = list(
        instructor.from_openai(OpenAI()).chat.completions.create_partial(
            model=MODEL, messages=[{"role": "user", "content": ANNA}], response_model=Person
        )
    )
    assert parts[-1].name, parts


main()
