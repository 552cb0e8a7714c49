/* Vercel's AI SDK against a server: both of its providers, every way to ask; ends with 1 where one failed.

   mirrorsd serve storyteller.mirror &
   npm install ai @ai-sdk/openai-compatible @ai-sdk/openai zod
   node bench/claims/serving/clients.mjs http://127.0.0.1:8600/v1

   What a small model says is its own affair: counted is whether the SDK takes what comes. */
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const required = createRequire(pathToFileURL(`${process.cwd()}/`));
const load = (name) => import(pathToFileURL(required.resolve(name)));
const { generateObject, generateText, stepCountIs, streamObject, streamText, tool } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { createOpenAI } = await load("@ai-sdk/openai");
const { z } = await load("zod");

const baseURL = process.argv[2];
const { data } = await (await fetch(`${baseURL}/models`)).json();
const id = data[0].id;
const compatible = createOpenAICompatible({
  name: "local", baseURL, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true,
});
const openai = createOpenAI({ baseURL, apiKey: "none" });
const chats = { compatible: compatible(id), "openai, chat": openai.chat(id), "openai, responses": openai(id) };
const texts = { "compatible, completions": compatible.completionModel(id), "openai, completions": openai.completion(id) };
const weather = tool({
  description: "Tell the weather in a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `It rains in ${city}.`,
});
const clock = tool({ description: "Tell the time.", inputSchema: z.object({}), execute: async () => "12:30" });
const person = z.object({ name: z.string(), age: z.number().int() });
let failed = 0;

async function attempt(name, work) {
  try {
    console.log(name, "|", true, "|", JSON.stringify(await work()).slice(0, 200));
  } catch (error) {
    failed += 1;
    console.log(name, "|", false, "|", error.name, String(error.message).slice(0, 300), error.responseBody ?? "");
  }
}

/* All of a stream's parts; its errors do not come as exceptions. */
async function drained(result, parts) {
  for await (const part of parts) if (part.type === "error") throw part.error;
  return result;
}

for (const [name, model] of Object.entries({ ...chats, ...texts })) {
  const plain = { model, prompt: "Name one colour.", maxOutputTokens: 20, maxRetries: 0 };
  await attempt(`${name}: generateText`, async () => {
    const { text, finishReason, usage } = await generateText(plain);
    if (!usage.outputTokens) throw new Error("no usage");
    return [text, finishReason];
  });
  await attempt(`${name}: streamText`, async () => {
    const result = streamText({ ...plain, onError: () => {} });
    await drained(result, result.fullStream);
    return [await result.text, await result.usage];
  });
}
for (const [name, model] of Object.entries(chats)) {
  const asked = { model, prompt: "What is the weather in Oslo?", tools: { weather, clock }, maxOutputTokens: 60, maxRetries: 0 };
  const told = ({ steps }) => steps.map((step) => [step.finishReason, step.toolCalls.map((call) => call.toolName)]);
  for (const toolChoice of ["auto", "required", { type: "tool", toolName: "weather" }]) {
    const steps = { ...asked, toolChoice, stopWhen: stepCountIs(3) };
    const kind = toolChoice.toolName ?? toolChoice;
    await attempt(`${name}: three steps, ${kind}`, async () => told(await generateText(steps)));
    await attempt(`${name}: three steps, ${kind}, streamed`, async () => {
      const result = streamText({ ...steps, onError: () => {} });
      await drained(result, result.fullStream);
      return told({ steps: await result.steps });
    });
  }
  await attempt(`${name}: two tools, then words`, async () => {
    const prepareStep = ({ stepNumber }) => ({
      toolChoice: stepNumber < 2 ? { type: "tool", toolName: ["weather", "clock"][stepNumber] } : "none",
    });
    const result = await generateText({ ...asked, prepareStep, stopWhen: stepCountIs(3) });
    if (result.steps.length !== 3) throw new Error(`${result.steps.length} steps`);
    return told(result);
  });
  const invented = { model, prompt: "Invent a person.", maxRetries: 0 };
  await attempt(`${name}: generateObject`, async () => (await generateObject({ ...invented, schema: person })).object);
  await attempt(`${name}: generateObject, enum`, async () => {
    return (await generateObject({ ...invented, output: "enum", enum: ["red", "blue"] })).object;
  });
  await attempt(`${name}: streamObject`, async () => {
    const result = streamObject({ ...invented, schema: person, onError: () => {} });
    await drained(result, result.fullStream);
    return await result.object;
  });
}
process.exit(failed ? 1 : 0);
