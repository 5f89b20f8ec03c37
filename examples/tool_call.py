"""Let the model call a function, give it the result, and read the answer.

PENSTOCK_API_KEY=sk-... python examples/tool_call.py
"""

import json
import os
import sys

from openai import OpenAI, OpenAIError

URL = os.environ.get("PENSTOCK_URL") or f"http://127.0.0.1:{os.environ.get('PENSTOCK_PORT') or 8000}/v1"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def get_weather(city: str) -> dict:
    """Stands for a real weather service."""
    return {"temperature": 18 + len(city) % 2, "conditions": "sunny"}


def main() -> None:
    client = OpenAI(base_url=URL, api_key=os.environ.get("PENSTOCK_API_KEY") or "none")
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    asked = client.chat.completions.create(model="penstock-demo", messages=messages, tools=[WEATHER])
    call = asked.choices[0].message.tool_calls[0]
    print(f"the model calls {call.function.name}({call.function.arguments})")

    result = get_weather(**json.loads(call.function.arguments))
    messages += [
        asked.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)},
    ]
    answer = client.chat.completions.create(model="penstock-demo", messages=messages, tools=[WEATHER])
    print(answer.choices[0].message.content)


try:
    main()
except OpenAIError as error:  # No server, no key, or one that it does not know.
    sys.exit(f"{URL}: {error} (is there a server? `make serve` starts one; PENSTOCK_API_KEY is its key)")
