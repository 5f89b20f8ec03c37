"""Fifty questions at once: the engine batches them, and every answer is what it would be alone.

PENSTOCK_API_KEY=sk-... python examples/many_at_once.py
"""

import asyncio
import os
import sys

from openai import AsyncOpenAI, OpenAIError

URL = os.environ.get("PENSTOCK_URL") or f"http://127.0.0.1:{os.environ.get('PENSTOCK_PORT') or 8000}/v1"
QUESTIONS = [f"What is {a} + {b}?" for a in range(10, 20) for b in (1, 5, 20, 30, 40)]


async def main() -> None:
    # A busy server refuses what it could not answer in time, and says when to come again: the client does so
    # by itself.
    key = os.environ.get("PENSTOCK_API_KEY") or "none"
    async with AsyncOpenAI(base_url=URL, api_key=key, max_retries=8) as client:
        await client.with_options(max_retries=0).models.list()  # Is there a server?

        async def ask(question: str) -> str:
            answer = await client.chat.completions.create(
                model="penstock-demo", messages=[{"role": "user", "content": question}], temperature=0
            )
            return answer.choices[0].message.content

        together = await asyncio.gather(*(ask(question) for question in QUESTIONS))
        alone = await ask(QUESTIONS[0])
    print("\n".join(together))
    print("the first one, asked again alone:", "the same" if alone == together[0] else "DIFFERENT")


try:
    asyncio.run(main())
except OpenAIError as error:  # No server, no key, or one that it does not know.
    sys.exit(f"{URL}: {error} (is there a server? `make serve` starts one; PENSTOCK_API_KEY is its key)")
