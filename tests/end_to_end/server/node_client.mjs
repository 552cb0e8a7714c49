// The official Node client against a server: `node node_client.mjs URL`, beside a node_modules with `openai`.
// Prints one JSON object; throws where the client does not take an answer.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Every morning the fox" }];
const usual = { model: "tiny", messages, max_tokens: 24, ignore_eos: true };

const whole = await client.chat.completions.create(usual);
let streamed = "";
let usage = null;
for await (const chunk of await client.chat.completions.create({
  ...usual,
  stream: true,
  stream_options: { include_usage: true },
})) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}

const tools = [
  {
    type: "function",
    function: {
      name: "weather",
      parameters: {
        type: "object",
        properties: { city: { enum: ["Rome", "Oslo"] } },
        required: ["city"],
        additionalProperties: false,
      },
    },
  },
];
const runner = client.chat.completions.stream({ model: "tiny", messages, tools, tool_choice: "required", max_tokens: 120 });
const called = await runner.finalChatCompletion();

const logprobs = await client.chat.completions.create({ ...usual, logprobs: true, top_logprobs: 2 });
const place = {
  type: "object",
  properties: { place: { enum: ["river", "forest"] } },
  required: ["place"],
  additionalProperties: false,
  "x-guidance": { whitespace_flexible: false },
};
const format = { type: "json_schema", json_schema: { name: "place", schema: place } };
const json = await client.chat.completions.create({ model: "tiny", messages, max_tokens: 80, response_format: format });
const response = await client.responses.create({ model: "tiny", input: "Every morning the fox", max_output_tokens: 8 });

let error = null;
try {
  await client.chat.completions.create({ ...usual, model: "other" });
} catch (found) {
  error = { name: found.constructor.name, status: found.status, code: found.code };
}

console.log(
  JSON.stringify({
    whole: whole.choices[0].message.content,
    streamed,
    usage,
    call: called.choices[0].message.tool_calls[0].function,
    finish: called.choices[0].finish_reason,
    logprobs: logprobs.choices[0].logprobs.content.length,
    place: JSON.parse(json.choices[0].message.content).place,
    response: response.output_text,
    error,
  }),
);
