import {askKey, headers, text} from "./common.js";
import {count, number, seconds} from "./charts.js";

const byId = id => document.getElementById(id);
const form = byId("ask");
let messages = [], running = null;

async function model() {
  const response = await fetch("v1/models", {headers: headers()});
  if (response.status === 401) return askKey(byId("trouble"), model);
  if (response.ok) byId("model").textContent = (await response.json()).data[0].id;
}

form.addEventListener("submit", event => {
  event.preventDefault();
  if (running) return running.abort();
  const words = form.elements.words.value.trim();
  if (!words) return;
  form.elements.words.value = "";
  messages.push({role: "user", content: words});
  byId("talk").append(text("div", words, "said user"));
  answer();
});

form.elements.words.addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); form.requestSubmit(); }
});

byId("clear").addEventListener("click", () => { running?.abort(); messages = []; byId("talk").replaceChildren(); });

async function answer() {
  const bubble = text("div", "", "said assistant"), thought = text("span", "", "thought"), shown = text("span", "");
  const figures = text("div", "", "figures");
  byId("talk").append(bubble, figures);
  bubble.append(shown);
  running = new AbortController();
  byId("send").textContent = "Stop";
  const state = {started: performance.now(), first: null, usage: null, content: ""};
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST", signal: running.signal, headers: headers({"content-type": "application/json"}),
      body: JSON.stringify({messages, stream: true, temperature: form.elements.temperature.valueAsNumber,
        max_completion_tokens: form.elements.limit.valueAsNumber,
        stream_options: {include_usage: true, continuous_usage_stats: true}}),
    });
    if (response.status === 401) askKey(byId("trouble"), model);
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      state.usage = event.usage ?? state.usage;
      const delta = event.choices[0]?.delta ?? {};
      if (state.first === null && (delta.content || delta.reasoning_content)) state.first = performance.now();
      if (delta.reasoning_content) {
        if (!thought.parentNode) bubble.prepend(thought);
        thought.textContent += delta.reasoning_content;
      }
      if (delta.content) shown.textContent = state.content += delta.content;
      const withdrawal = event.choices[0]?.withdrawal;
      if (withdrawal) withdraw(bubble, thought, shown, state, withdrawal);
      figures.textContent = pace(state);
      window.scrollTo({top: document.body.scrollHeight});
    }
  } catch (error) {
    if (error.name !== "AbortError") { bubble.classList.add("failed"); shown.textContent += error.message; }
    else figures.textContent = [figures.textContent, "stopped"].filter(Boolean).join(" · ");
  }
  if (state.content) messages.push({role: "assistant", content: state.content});
  running = null;
  byId("send").textContent = "Send";
}

// Everything of the answer goes, also the reasoning; the replacement is its text now.
function withdraw(bubble, thought, shown, state, withdrawal) {
  thought.remove();
  state.content = withdrawal.replacement;
  const why = withdrawal.reason === "flagged" ? "This answer was withdrawn." : "This answer was withdrawn, because it could not be judged.";
  shown.textContent = state.content || why;
  bubble.classList.add("withdrawn");
}

// Time to first token, tokens per second after it, token counts.
function pace(state) {
  if (state.first === null) return "";
  const parts = [`first token after ${seconds((state.first - state.started) / 1e3)}`];
  const spent = (performance.now() - state.first) / 1e3, usage = state.usage;
  if (usage && usage.completion_tokens > 1 && spent > 0) parts.push(`${number((usage.completion_tokens - 1) / spent)} tokens/s`);
  if (usage) parts.push(`${count(usage.prompt_tokens, "token")} in (${usage.prompt_tokens_details.cached_tokens} cached), ${usage.completion_tokens} out`);
  return parts.join(" · ");
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let held = "";;) {
    const {value, done} = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts)
      if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
  }
}

model();
