"""The `openai` package: a typed answer, a streamed call, and an agent's loop, by chats and by responses."""

import json

from asked import ANNA, MODEL, WEATHER, Person, check_answer, weather
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel


class get_weather(BaseModel):
    """Get the current weather in a city."""

    city: str


def main() -> None:
    client = OpenAI()
    answer = client.chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": ANNA}], response_format=Person
    )
    assert answer.choices[0].message.parsed == Person(name="Anna", age=31), answer
    response = client.responses.parse(model=MODEL, input=ANNA, text_format=Person)
    assert response.output_parsed == Person(name="Anna", age=31), response

    tools = [pydantic_function_tool(get_weather)]
    forced = {"type": "function", "function": {"name": "get_weather"}}
    messages = [{"role": "user", "content": WEATHER}]
    with client.chat.completions.stream(
        model=MODEL, messages=messages, tools=tools, tool_choice=forced
    ) as stream:
        call = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert call.function.parsed_arguments == get_weather(city="Paris"), call

    function = {"type": "function", **tools[0]["function"], "strict": False}
    with client.responses.stream(model=MODEL, input=WEATHER, tools=[function]) as stream:
        first = stream.get_final_response()
    (call,) = first.output
    result = weather(**json.loads(call.arguments))
    second = client.responses.create(
        model=MODEL,
        previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": result}],
        tools=[function],
    )
    check_answer(second.output_text)


main()
