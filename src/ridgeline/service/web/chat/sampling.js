// The fields of a request that the settings panel offers, and the body of a request. An empty field is not sent: the server's
// default holds.

export const NUMBERS = [
  {name: "temperature", min: 0, max: 2, step: 0.05, about: "0 always takes the most probable token"},
  {name: "top_p", min: 0, max: 1, step: 0.01, about: "nucleus sampling"},
  {name: "top_k", min: -1, max: 1048576, step: 1, about: "keep the k most probable tokens; 0 keeps all"},
  {name: "min_p", min: 0, max: 1, step: 0.01, about: "drop tokens below this share of the most probable one"},
  {name: "presence_penalty", min: -2, max: 2, step: 0.1, about: "subtracted once from tokens of the answer"},
  {name: "frequency_penalty", min: -2, max: 2, step: 0.1, about: "subtracted per occurrence in the answer"},
  {name: "repetition_penalty", min: 0.01, max: 100, step: 0.01, about: "above 1 makes repetitions less probable"},
  {name: "max_tokens", min: 1, max: 1e9, step: 1, about: "longest answer, thoughts included"},
  {name: "seed", min: -Number.MAX_SAFE_INTEGER, max: Number.MAX_SAFE_INTEGER, step: 1, about: "the same seed draws the same tokens"},
];
export const EFFORTS = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];

// models: one name, or two to compare. together: both answer at the same time. stop: strings, one a line.
export function emptySettings() {
  return {models: [""], together: false, system: "", numbers: {}, stop: "", effort: ""};
}

// Settings as they were stored, perhaps by an earlier version or by hand.
export function readSettings(stored) {
  const empty = emptySettings(), given = stored && typeof stored === "object" ? stored : {};
  const known = Object.fromEntries(Object.entries(empty).map(([name, value]) =>
    [name, typeof given[name] === typeof value && given[name] !== null ? given[name] : value]));
  const numbers = NUMBERS.map(({name}) => [name, known.numbers[name]]).filter(([, value]) => Number.isFinite(value));
  const models = Array.isArray(known.models) ? known.models.filter(name => typeof name === "string").slice(0, 2) : [];
  return {...known, numbers: Object.fromEntries(numbers), models: models.length ? models : empty.models};
}

export function requestBody(settings, model, messages) {
  const stop = settings.stop.split("\n").filter(line => line !== "");
  return {
    ...(model ? {model} : {}),
    messages,
    ...settings.numbers,
    ...(stop.length ? {stop} : {}),
    ...(settings.effort ? {reasoning_effort: settings.effort} : {}),
    stream: true,
    stream_options: {include_usage: true, continuous_usage_stats: true},
  };
}
