"""Stream an answer.

make serve                                   # prints a key
pip install openai
PENSTOCK_API_KEY=sk-... python examples/stream.py "What is the capital of France?"
"""

import os
import sys

from openai import OpenAI, OpenAIError

URL = os.environ.get("PENSTOCK_URL") or f"http://127.0.0.1:{os.environ.get('PENSTOCK_PORT') or 8000}/v1"


def main() -> None:
    client = OpenAI(base_url=URL, api_key=os.environ.get("PENSTOCK_API_KEY") or "none")
    question = " ".join(sys.argv[1:]) or "What is Penstock?"
    stream = client.chat.completions.create(
        model="penstock-demo",
        messages=[{"role": "user", "content": question}],
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        if chunk.usage:
            print(f"\n({chunk.usage.prompt_tokens} prompt tokens, {chunk.usage.completion_tokens} generated)")


try:
    main()
except OpenAIError as error:  # No server, no key, or one that it does not know.
    sys.exit(f"{URL}: {error} (is there a server? `make serve` starts one; PENSTOCK_API_KEY is its key)")
