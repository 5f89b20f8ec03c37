// What every client asks the demo model, which knows such questions.
import assert from "node:assert/strict";
import { z } from "zod";

export const MODEL = "penstock-demo";
export const ANNA = "Extract name and age as JSON: Anna is 31 years old and lives in Paris.";
export const WEATHER = "What is the weather in Paris?";
export const Person = z.object({ name: z.string(), age: z.number().int() });

export function weather({ city }) {
  return city === "Paris" ? { temperature: 19, conditions: "sunny" } : { error: "unknown" };
}

// As the demo model was shown such results.
export function weatherText(asked) {
  return JSON.stringify(weather(asked), null, 1).replaceAll("\n ", " ").replace("{ ", "{").replace("\n}", "}");
}

export function checkAnswer(text) {
  for (const word of ["Paris", "sunny", "19"]) assert.ok(text.includes(word), text);
}
