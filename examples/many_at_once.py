"""Fifty questions at once: the engine batches them, and every answer is what it would be alone.

PENSTOCK_API_KEY=sk-... python examples/many_at_once.py
"""

import asyncio
import os

from openai import AsyncOpenAI

QUESTIONS = [f"What is {a} + {b}?" for a in range(10, 20) for b in (1, 5, 20, 30, 40)]


async def main() -> None:
    async with AsyncOpenAI(
        base_url=os.environ.get("PENSTOCK_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ["PENSTOCK_API_KEY"],
    ) as client:

        async def ask(question: str) -> str:
            answer = await client.chat.completions.create(
                model="penstock-demo", messages=[{"role": "user", "content": question}], temperature=0
            )
            return answer.choices[0].message.content

        together = await asyncio.gather(*(ask(question) for question in QUESTIONS))
        alone = await ask(QUESTIONS[0])
    print("\n".join(together))
    print("the first one, asked again alone:", "the same" if alone == together[0] else "DIFFERENT")


asyncio.run(main())
