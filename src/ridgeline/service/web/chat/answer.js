// An answer while it arrives: the request, the events of its stream, and the figures that they give.

import {count, number, seconds} from "../charts.js";
import {headers} from "../common.js";
import {jsonEvents} from "./events.js";

export class KeyNeeded extends Error {}

// Fill `reply` with the server's answer. `changed` is called after each event. Problems become the reply's error; only a
// missing key is raised as well.
export async function answer(reply, body, signal, changed) {
  const began = performance.now();
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST", signal, headers: headers({"content-type": "application/json"}), body: JSON.stringify(body),
    }).catch(() => { throw new Error("The server cannot be reached."); });
    if (!response.ok) throw await problemOf(response);
    reply.ignored = response.headers.get("x-ridgeline-ignored-fields") ?? "";
    for await (const event of jsonEvents(response.body)) {
      take(reply, event, performance.now() - began);
      changed();
    }
  } catch (error) {
    reply.finish = signal.aborted ? "stopped" : "failed";
    if (!signal.aborted) reply.error = error.message;
    if (error instanceof KeyNeeded) throw error;
  }
}

// Whether a request to the model waits until it is loaded.
export async function needsLoad(model) {
  const name = model.split("/").map(encodeURIComponent).join("/");
  const card = await fetch(`v1/models/${name}`, {headers: headers()}).then(response => response.json()).catch(() => ({}));
  return (card.state ?? "awake") !== "awake";
}

async function problemOf(response) {
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? `The server answers ${response.status} ${response.statusText}.`;
  return response.status === 401 ? new KeyNeeded(message) : new Error(message);
}

// Add an event to the reply. elapsed: milliseconds since the request. Figures are times in milliseconds and counts of tokens.
export function take(reply, event, elapsed) {
  if (event.error) throw new Error(event.error.message);
  const {figures} = reply, choice = event.choices?.[0], delta = choice?.delta ?? {};
  const tokens = event.usage?.completion_tokens ?? figures.output ?? 0;
  if (figures.first === undefined && (delta.content || delta.reasoning_content)) {
    Object.assign(figures, {first: elapsed, firstTokens: tokens});
  }
  if (tokens > (figures.output ?? 0)) figures.last = elapsed;
  if (event.usage) {
    const cached = event.usage.prompt_tokens_details?.cached_tokens ?? 0;
    Object.assign(figures, {input: event.usage.prompt_tokens, cached, output: tokens});
  }
  if (delta.reasoning_content) {
    reply.reasoning += delta.reasoning_content;
    figures.thought = elapsed - figures.first;
  }
  reply.content += delta.content ?? "";
  if (choice?.withdrawal) withdraw(reply, choice.withdrawal);
  else if (choice?.finish_reason) reply.finish = choice.finish_reason;
}

// Everything of the answer goes, also the reasoning. The replacement, which may be empty, is its text now.
function withdraw(reply, {reason, replacement}) {
  Object.assign(reply, {content: replacement, reasoning: "", finish: "content_filter", withdrawn: reason || "flagged"});
}

// Time to first token, tokens per second after it, token counts, and how the answer ended if not by itself.
export function figuresOf({figures, finish, ignored}) {
  const {load, first, firstTokens, last, input, cached, output} = figures, parts = [];
  if (first !== undefined) parts.push(`first token after ${seconds(first / 1e3)}${load ? ", load of the model included" : ""}`);
  if (output > firstTokens && last > first) parts.push(`${number((output - firstTokens) / (last - first) * 1e3)} tokens/s`);
  if (input !== undefined) parts.push(`${count(input, "token")} in (${cached} cached), ${output} out`);
  if (finish === "length") parts.push("cut at the token limit");
  if (finish === "stopped") parts.push("stopped");
  if (ignored) parts.push(`without effect on this model: ${ignored}`);
  return parts.join(" · ");
}
