/** The server's API: its models, and an answer as it comes. What goes wrong is a `Problem`. */

import { kept } from "./dom.js";

/** An error with its cause and what to do about it, as the user is told. */
export class Problem extends Error {
  constructor(cause, next, status = 0, code = "") {
    super(cause);
    Object.assign(this, { next, status, code });
  }
}

const AGAIN = "See whether the server still runs, then try again.";
const NEXT = {
  401: "Give the server's API key.",
  403: "Give another API key in the settings.",
  404: "Choose another model.",
  model_not_found: "Choose another model.",
  413: "Send less at once.",
  429: "Try again when others are done.",
  rate_limit_exceeded: "Try again when others are done.",
  503: "Try again in a moment.",
  out_of_memory: "Choose a smaller model, or try again when others are done.",
  context_length_exceeded: "Begin a new conversation, or edit an early message to be shorter.",
};

/** The server's key, as this browser has it. */
export const key = { get: () => kept.get("tegrad.key") ?? "", set: (value) => kept.set("tegrad.key", value) };

/** What the error in a body ({message, code}) says. */
function problem(error, status, wait) {
  const cause = String(error?.message ?? error ?? "").trim() || `The server answered with status ${status}.`;
  const code = String(error?.code ?? "");
  const next = wait ? `Try again in ${wait} s.` : NEXT[code] ?? NEXT[status] ?? "See the server's log, then try again.";
  const sentence = cause[0].toUpperCase() + cause.slice(1) + (/[.!?]$/.test(cause) ? "" : ".");
  return new Problem(sentence, next, status, code);
}

/** A response of the server, by an address relative to the page's. */
async function request(path, options = {}) {
  const headers = { ...options.headers, ...(key.get() && { Authorization: `Bearer ${key.get()}` }) };
  let response;
  try {
    response = await fetch(new URL(path, document.baseURI), { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The server did not answer.", AGAIN);
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw problem(body?.error, response.status, response.headers.get("Retry-After"));
}

/** The models that may be asked, as /v1/models lists them. */
export async function models() {
  return (await (await request("v1/models")).json()).data;
}

/** The data of the events in a body. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
  }
}

/** The chunks of an answer to a chat request; `signal` ends it. */
export async function* answer(asked, signal) {
  const body = JSON.stringify({ ...asked, stream: true, stream_options: { include_usage: true } });
  const response = await request("v1/chat/completions", {
    method: "POST", headers: { "Content-Type": "application/json" }, body, signal,
  });
  let finished = false;
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw problem(chunk.error, response.status);
      finished ||= Boolean(chunk.choices?.[0]?.finish_reason);
      yield chunk;
    }
  } catch (error) {
    if (error instanceof Problem || error.name === "AbortError") throw error;
    throw new Problem("The connection to the server broke off.", AGAIN);
  }
  if (!finished) throw new Problem("The server ended the answer too early.", AGAIN);
}
