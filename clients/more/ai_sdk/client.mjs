// Vercel's AI SDK with its provider for OpenAI-compatible servers: text, streams, a tool, an object, errors.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { run, server } from "../calls.mjs";

const provider = (apiKey) => createOpenAICompatible(
  { name: "slotwise", baseURL: server.base_url, apiKey, includeUsage: true, supportsStructuredOutputs: true });
const model = provider(server.key)(server.model);
const asked = { model, prompt: "What is the capital of Japan?", temperature: 0, maxOutputTokens: 48, maxRetries: 0 };

async function whole() {
  const { text, finishReason, usage } = await generateText(asked);
  return { text, finishReason, usage };
}

async function stream() {
  const result = streamText(asked);
  const pieces = [];
  for await (const piece of result.textStream) pieces.push(piece);
  return { pieces, finishReason: await result.finishReason, usage: await result.usage };
}

// The model must call the tool in the first step, for small ones seldom do so by themselves, and then answers freely.
async function tools() {
  const ran = [];
  const weather = tool({
    description: "The weather in a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => {
      ran.push(city);
      return `The weather in ${city} is sunny, 18 degrees.`;
    },
  });
  const result = streamText({
    ...asked, prompt: "What is the weather in Paris?", tools: { weather }, stopWhen: stepCountIs(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? { type: "tool", toolName: "weather" } : "auto" }),
  });
  const steps = await result.steps;
  return { ran, answer: await result.text, reasons: steps.map((step) => step.finishReason) };
}

async function object() {
  const schema = z.object({ city: z.string(), continent: z.enum(["Europe", "Asia", "Africa"]) });
  const { output } = await generateText({ ...asked, prompt: "Where is Paris?", output: Output.object({ schema }) });
  return output;
}

async function errors() {
  const told = {};
  for (const [name, more] of Object.entries({
    key: { model: provider("wrong")(server.model) }, model: { model: provider(server.key)("gpt-4") },
    length: { prompt: "word ".repeat(9000) } })) {
    try {
      await generateText({ ...asked, ...more });
    } catch (error) {
      if (!APICallError.isInstance(error)) throw error;
      told[name] = { status: error.statusCode, message: error.message };
    }
  }
  return told;
}

await run({ whole, stream, tools, object, errors });
