// The `openai` package of Node: typed answers and an agent's loop, by chats and by responses.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { ANNA, MODEL, Person, WEATHER, checkAnswer, weatherText } from "./asked.mjs";

const client = new OpenAI();
const anna = { name: "Anna", age: 31 };
const answer = await client.chat.completions.parse({
  model: MODEL,
  messages: [{ role: "user", content: ANNA }],
  response_format: zodResponseFormat(Person, "person"),
});
assert.deepEqual(answer.choices[0].message.parsed, anna);
const response = await client.responses.parse({
  model: MODEL,
  input: ANNA,
  text: { format: zodTextFormat(Person, "person") },
});
assert.deepEqual(response.output_parsed, anna);

const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const described = { name: "get_weather", description: "Get the current weather in a city", parameters };
const runner = client.chat.completions.runTools({
  model: MODEL,
  messages: [{ role: "user", content: WEATHER }],
  tools: [{ type: "function", function: { ...described, parse: JSON.parse, function: weatherText } }],
});
checkAnswer(await runner.finalContent());

const tools = [{ type: "function", strict: false, ...described }];
const first = await client.responses.stream({ model: MODEL, input: WEATHER, tools }).finalResponse();
const calls = first.output.filter((item) => item.type === "function_call");
const input = calls.map((call) => ({
  type: "function_call_output",
  call_id: call.call_id,
  output: weatherText(JSON.parse(call.arguments)),
}));
const second = await client.responses.create({ model: MODEL, previous_response_id: first.id, input, tools });
checkAnswer(second.output_text);
