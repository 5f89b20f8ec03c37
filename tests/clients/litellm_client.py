"""`litellm` as a client: a typed answer, an agent's loop that sends back what it was given, and responses."""

import json

import litellm
from asked import ANNA, KEY, MODEL, URL, WEATHER, Person, check_answer, weather

PLACE = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": KEY}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def main() -> None:
    asked = [{"role": "user", "content": ANNA}]
    answer = litellm.completion(messages=asked, response_format=Person, **PLACE)
    assert Person.model_validate_json(answer.choices[0].message.content) == Person(name="Anna", age=31)
    messages = [{"role": "user", "content": WEATHER}]
    message = litellm.completion(messages=messages, tools=[TOOL], **PLACE).choices[0].message
    messages.append(message)
    for call in message.tool_calls:
        result = weather(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    check_answer(litellm.completion(messages=messages, tools=[TOOL], **PLACE).choices[0].message.content)
    response = litellm.responses(input="What is the capital of France?", **PLACE)
    assert response.output[-1].content[0].text == "The capital of France is Paris.", response


main()
