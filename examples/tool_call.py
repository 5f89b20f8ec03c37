"""Let the model call a function, give it the result, and read the answer.

PENSTOCK_API_KEY=sk-... python examples/tool_call.py
"""

import json
import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("PENSTOCK_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ["PENSTOCK_API_KEY"],
)
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
