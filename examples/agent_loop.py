"""An agent: the model calls functions until it can answer. The Responses API keeps what was said, so that
each turn sends only what is new.

PENSTOCK_API_KEY=sk-... python examples/agent_loop.py "What is the weather in Paris?"
"""

import json
import os
import sys

from openai import OpenAI, OpenAIError

URL = os.environ.get("PENSTOCK_URL") or f"http://127.0.0.1:{os.environ.get('PENSTOCK_PORT') or 8000}/v1"
TURNS_MAX = 5


def get_weather(city: str) -> dict:
    """Stands for a real weather service."""
    return {"temperature": 18 + len(city) % 2, "conditions": "sunny"}


FUNCTIONS = {"get_weather": get_weather}
TOOLS = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "Get the current weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": False,
    }
]


def main() -> None:
    client = OpenAI(base_url=URL, api_key=os.environ.get("PENSTOCK_API_KEY") or "none")
    said, previous = " ".join(sys.argv[1:]) or "What is the weather in Paris?", None
    for _ in range(TURNS_MAX):
        response = client.responses.create(
            model="penstock-demo", input=said, tools=TOOLS, previous_response_id=previous
        )
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            print(response.output_text)
            return
        said, previous = [], response.id
        for call in calls:
            print(f"{call.name}({call.arguments})")
            result = FUNCTIONS[call.name](**json.loads(call.arguments))
            said.append(
                {"type": "function_call_output", "call_id": call.call_id, "output": json.dumps(result)}
            )
    sys.exit(f"no answer after {TURNS_MAX} turns")


try:
    main()
except OpenAIError as error:  # No server, no key, or one that it does not know.
    sys.exit(f"{URL}: {error} (is there a server? `make serve` starts one; PENSTOCK_API_KEY is its key)")
