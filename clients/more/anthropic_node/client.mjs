// Anthropic's client for Node: a whole answer, a stream, a tool, counted tokens, errors.
import Anthropic from "@anthropic-ai/sdk";
import { run, server } from "../calls.mjs";

const client = new Anthropic({ baseURL: server.url, apiKey: server.key, maxRetries: 0 });
const asked = {
  model: server.model, max_tokens: 48, temperature: 0, system: "Answer in one sentence.",
  messages: [{ role: "user", content: "What is the capital of Japan?" }],
};
const tools = [{
  name: "weather", description: "The weather in a city.",
  input_schema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
}];

async function whole() {
  const message = await client.messages.create(asked);
  return { text: message.content[0].text, stop: message.stop_reason, usage: message.usage };
}

async function stream() {
  const pieces = [];
  const stream = client.messages.stream(asked).on("text", (text) => pieces.push(text));
  const message = await stream.finalMessage();
  return { pieces, text: message.content[0].text, stop: message.stop_reason, usage: message.usage };
}

// The model must call the tool at first, for small ones seldom do so by themselves, and then answers freely.
async function tool() {
  const messages = [{ role: "user", content: "What is the weather in Paris?" }];
  const stream = client.messages.stream(
    { ...asked, messages, tools, tool_choice: { type: "tool", name: "weather" } });
  const called = await stream.finalMessage();
  const use = called.content.find((block) => block.type === "tool_use");
  const ran = `The weather in ${use.input.city} is sunny, 18 degrees.`;
  messages.push({ role: "assistant", content: called.content });
  messages.push({ role: "user", content: [{ type: "tool_result", tool_use_id: use.id, content: ran }] });
  const answer = await client.messages.create({ ...asked, messages, tools });
  return { stop: called.stop_reason, name: use.name, input: use.input, answer: answer.content[0].text };
}

async function count() {
  const { model, system, messages } = asked;
  return (await client.messages.countTokens({ model, system, messages })).input_tokens;
}

async function refused(call) {
  try {
    await call();
    return null;
  } catch (error) {
    return { name: error.constructor.name, status: error.status, type: error.type, message: error.message };
  }
}

async function errors() {
  const stranger = new Anthropic({ baseURL: server.url, apiKey: "wrong", maxRetries: 0 });
  return {
    key: await refused(() => stranger.messages.create(asked)),
    model: await refused(() => client.messages.create({ ...asked, model: "claude" })),
    length: await refused(() => client.messages.create({ ...asked, messages: [{ role: "user", content: "word ".repeat(9000) }] })),
  };
}

await run({ whole, stream, tool, count, errors });
