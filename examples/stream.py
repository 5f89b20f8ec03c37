"""Stream an answer.

make serve                                   # prints a key
PENSTOCK_API_KEY=sk-... python examples/stream.py "What is the capital of France?"
"""

import os
import sys

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("PENSTOCK_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ["PENSTOCK_API_KEY"],
)
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
