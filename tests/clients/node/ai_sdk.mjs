// The AI SDK: typed answers and an agent's loop, by chats (openai-compatible) and by responses (its OpenAI default).
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamObject, tool } from "ai";
import { z } from "zod";
import { ANNA, MODEL, Person, WEATHER, checkAnswer, weather } from "./asked.mjs";

const place = { name: "penstock", baseURL: process.env.OPENAI_BASE_URL, apiKey: process.env.OPENAI_API_KEY };
const models = [
  createOpenAICompatible({ ...place, supportsStructuredOutputs: true })(MODEL),
  createOpenAI(place)(MODEL),
];
const tools = {
  get_weather: tool({
    description: "Get the current weather in a city",
    inputSchema: z.object({ city: z.string() }),
    execute: weather,
  }),
};
for (const model of models) {
  const { object } = await generateObject({ model, schema: Person, prompt: ANNA });
  assert.deepEqual(object, { name: "Anna", age: 31 });
  let last;
  for await (const part of streamObject({ model, schema: Person, prompt: ANNA }).partialObjectStream) last = part;
  assert.deepEqual(last, { name: "Anna", age: 31 });
  const { text, steps } = await generateText({ model, tools, prompt: WEATHER, stopWhen: stepCountIs(3) });
  assert.equal(steps.length, 2);
  checkAnswer(text);
}
