import {askKey, headers, text} from "./common.js";
import {count, number, roofline, seconds, series} from "./charts.js";

const EVERY_MS = 1000, KEPT = 360, NONE = "no request in the last five minutes";
const byId = id => document.getElementById(id);
const readings = [];   // the server's readings of the last hour, the oldest first
const open = new Set();   // requests whose details are shown
const CUTS = {cancelled: "disconnected by the client", refused: "rejected", drain: "ended by the server's shutdown",
  slow_reader: "ended because the client read too slowly", error: "failed"};
const BLAMES = {queue: "in the queue", prefill: "in prefill", decode: "in decode", client: "outside of the engine", error: "failed"};

async function poll() {
  try {
    const response = await fetch(`dashboard/data?since=${readings.at(-1)?.at ?? 0}`, {headers: headers()});
    if (response.status === 401 || response.status === 403) return askKey(byId("trouble"), poll);
    if (!response.ok) throw new Error(`the server answered ${response.status}`);
    const data = await response.json();
    readings.push(...data.readings);
    readings.splice(0, readings.length - KEPT);
    show(data);
  } catch (error) {
    byId("health").className = "dot bad";
    banner([`Cannot read the server's figures: ${error.message}.`]);
  }
  setTimeout(poll, document.hidden ? 5 * EVERY_MS : EVERY_MS);
}

function banner(lines) {
  byId("trouble").replaceChildren(...lines.map(line => text("p", line, "banner")));
}

function show(data) {
  byId("health").className = `dot ${data.healthy ? "good" : "bad"}`;
  const facts = data.facts, size = facts.params ? `${number(facts.params)} parameters` : "";
  byId("model").textContent = [data.model, size, facts.quantization || facts.dtype, facts.device].filter(Boolean).join(" · ");
  document.title = `${data.model} · Ridgeline dashboard`;
  banner([...(data.healthy ? [] : [`Not healthy: ${data.trouble}.`]), ...data.alerts.map(alert => alert.text)]);
  tiles(data);
  charts(data);
  ended(data);
  use(data);
  slowest(data.slowest);
}

function tiles(data) {
  const now = data.now, figures = data.figures, latencies = data.latencies, speed = data.user_speed, runs = data.agent_runs;
  const percent = value => value === undefined ? "–" : `${number(100 * value)} %`;
  const spread = latency => latency ? `p90 ${seconds(latency.p90)} · p99 ${seconds(latency.p99)}` : NONE;
  const rows = [
    ["Time to first token", seconds(latencies.ttft?.p50), "median", spread(latencies.ttft)],
    ["Time to publish", seconds(latencies.publish?.p50), "median", spread(latencies.publish)],
    ["Time per output token", seconds(latencies.tpot?.p50), "median", spread(latencies.tpot)],
    ["Speed of one user", number(speed.p50), "tokens per s, median",
      speed.p50 === undefined ? NONE : `slowest 5 %: below ${number(speed.p5)} · fastest 5 %: above ${number(speed.p95)}`],
    ["Output tokens", number(figures.output_tokens_per_second), "per s", `prompt tokens: ${number(figures.prompt_tokens_per_second)} per s`],
    ["Requests", number(now.running), "running", `${number(now.waiting)} waiting · ${number(figures.requests_per_second)} ended per s`],
    ["Requests per minute", number(figures.completed_requests_per_minute), "completed",
      `${number(figures.arriving_requests_per_minute)} arriving per minute`],
    ["Agent runs", seconds(runs.publish_seconds?.p50), "to publish, median", agentRuns(runs, figures)],
    figures.slo_attainment === undefined
      ? ["Goodput", "–", "", data.slo_text ? "no request has ended in the last five minutes" : "no SLO is declared (--slo)"]
      : ["Goodput", number(figures.goodput_requests_per_second), "requests per s",
        `${percent(figures.slo_attainment)} of requests met ${data.slo_text || "their own limits"}`],
    ["Prefix cache", percent(figures.prefix_hit_rate), "hits", `${percent(now.kv_used)} of the KV cache in use`],
    figures.watts === undefined
      ? ["Power", "–", "", "not measured on this machine"]
      : ["Power", number(figures.watts), "W", `${number(figures.joules_per_token)} J per token${data.ceilings.power === "estimate" ? ", estimated" : ""}`
        + ` · without idle power: prompt ${number(figures.joules_per_prompt_token)} J, output ${number(figures.joules_per_output_token)} J`],
    figures.cost_per_million_tokens === undefined
      ? ["Cost", "–", "", "no price is known (--price-per-hour)"]
      : ["Cost", `$${number(figures.cost_per_million_tokens)}`, "per M tokens", `at $${number(data.ceilings.price)} per hour, idle time included`],
  ];
  byId("tiles").replaceChildren(...rows.map(([title, value, unit, more]) => {
    const tile = text("div", "", "tile"), figure = text("div", value, "value");
    if (unit) figure.append(" ", text("small", unit));
    tile.append(text("h3", title), figure, text("div", more, "more"));
    return tile;
  }));
}

// Percentiles of the agent runs that ended in the last five minutes.
function agentRuns(runs, figures) {
  const open = figures.open_agent_runs ? `${number(figures.open_agent_runs)} open` : "";
  if (!runs.calls) return open || "no run (header x-run-id) in the last five minutes";
  const middle = [count(Math.round(runs.calls.p50), "call"), `${number(runs.tokens.p50)} tokens`];
  if (runs.cost_dollars) middle.push(`$${number(runs.cost_dollars.p50)}`);
  if (runs.joules) middle.push(`${number(runs.joules.p50)} J`);
  const late = runs.publish_seconds ? `p95 ${seconds(runs.publish_seconds.p95)}` : "";
  return [late, `medians: ${middle.join(", ")}`, open].filter(Boolean).join(" · ");
}

// Charts of the last hour.
function charts(data) {
  const points = [...readings, data], times = points.map(point => point.at);
  const of = pick => points.map(point => pick(point) ?? NaN);
  const limits = [["TTFT limit", data.slo.ttft], ["publish limit", data.slo.publish], ["TPOT limit", data.slo.tpot]].filter(([, value]) => value !== null);
  byId("latencynote").textContent = "Median and p95 (dashed) over five minutes. "
    + (limits.length ? `Dotted: the limits of the SLO ${data.slo_text}.` : data.slo_text ? `SLO: ${data.slo_text}.` : "No SLO is declared.");
  // Without hidden tokens the time to publish equals TTFT, and percentiles are exact within 1 %.
  const hides = points.some(point => point.latencies.publish?.p95 > 1.02 * point.latencies.ttft?.p95);
  const publish = [
    {name: "publish p50", colour: "third", values: of(point => point.latencies.publish?.p50)},
    {name: "publish p95", colour: "third", thin: true, values: of(point => point.latencies.publish?.p95)},
  ];
  series(byId("latency"), times, [
    ...(hides ? publish : []),
    {name: "TTFT p50", colour: "first", values: of(point => point.latencies.ttft?.p50)},
    {name: "TTFT p95", colour: "first", thin: true, values: of(point => point.latencies.ttft?.p95)},
    {name: "TPOT p50", colour: "second", values: of(point => point.latencies.tpot?.p50)},
    {name: "TPOT p95", colour: "second", thin: true, values: of(point => point.latencies.tpot?.p95)},
  ], {show: seconds, limits: limits.map(([name, value]) => ({name, value}))});
  series(byId("tokens"), times, [
    {name: "output", colour: "first", values: of(point => point.figures.output_tokens_per_second)},
    {name: "prompt", colour: "second", values: of(point => point.figures.prompt_tokens_per_second)},
  ]);
  series(byId("queue"), times, [
    {name: "running", colour: "first", values: of(point => point.now.running)},
    {name: "waiting", colour: "second", values: of(point => point.now.waiting)},
  ]);
  series(byId("cache"), times, [
    {name: "held %", colour: "first", values: of(point => 100 * point.now.kv_used)},
    {name: "kept for reuse %", colour: "third", values: of(point => 100 * point.now.kv_cached)},
    {name: "hit rate %", colour: "second", thin: true, values: of(point => 100 * point.figures.prefix_hit_rate)},
  ]);
  const top = data.ceilings, roofs = [];
  if (top.flops && top.bytes) roofs.push({name: "specification", flops: top.flops, bytes: top.bytes, colour: "quiet", thin: true});
  if (top.measured_flops && top.measured_bytes)
    roofs.push({name: "measured here", flops: top.measured_flops, bytes: top.measured_bytes, colour: "first"});
  if (roofs.length) roofline(byId("roof"), roofs, points.map(point => point.point).filter(Boolean).slice(-60));
  else byId("roofnote").textContent = "The peak FLOP/s and bandwidth of this device are not known.";
}

// Requests that ended early, and requests that missed the SLO.
function ended(data) {
  const listed = (counts, words) => Object.entries(counts).map(([name, total]) => `${total} ${words[name] ?? "failed"}`).join(", ");
  const notes = [];
  if (Object.keys(data.cut).length) notes.push(`Ended early in the last five minutes: ${listed(data.cut, CUTS)}.`);
  if (Object.keys(data.blamed).length) notes.push(`Missed the SLO in the last five minutes: ${listed(data.blamed, BLAMES)}.`);
  notes.push(...data.slo_broken.map(words => `The SLO is not met: ${words}.`));
  byId("ended").replaceChildren(...notes.map(note => text("p", note, "note")));
}

function use(data) {
  const figures = data.figures;
  const rows = [
    ["MFU, all time", figures.mfu_wall_clock], ["MBU, all time", figures.mbu_wall_clock], ["Device busy", figures.device_busy],
    ["MFU while busy", figures.mfu], ["MBU while busy", figures.mbu],
    ["MFU, executed", figures.mfu_executed], ["MBU, executed", figures.mbu_executed],
    ["MFU, measured peak", figures.mfu_measured], ["MBU, measured peak", figures.mbu_measured],
    ["Waiting for the host", figures.bubble], ["Computing prompts", figures.prompt_share],
  ].filter(row => row[1] !== undefined);
  const made = rows.map(([name, share]) => {
    const meter = text("div", "", "meter"), track = text("div", "", "track"), fill = document.createElement("div");
    fill.style.width = `${Math.min(100, 100 * share)}%`;
    track.append(fill);
    meter.append(text("span", name), track, text("span", `${number(100 * share)} %`, "figure"));
    return meter;
  });
  if (figures.step_prediction_error !== undefined)
    made.push(text("p", `Median error of predicted step times: ${number(100 * figures.step_prediction_error)} % `
      + `(${data.ceilings.calibration ? `calibrated ${data.ceilings.calibration}` : "uncalibrated"}).`, "note"));
  if (figures.input_tokens_per_output_token !== undefined)
    made.push(text("p", `One output token takes ${number(figures.input_tokens_per_output_token)} times as long as one prompt token.`, "note"));
  if (data.late.count)
    made.push(text("p", `Requests waited ${seconds(data.late.seconds)} for kernels or CUDA graphs that start-up had not prepared (${data.late.count}); the log names them.`, "note"));
  byId("use").replaceChildren(...(made.length ? made : [text("p", "No step has run in the last five minutes.", "note")]));
}

function slowest(rows) {
  if (!rows.length) return byId("slowest").replaceChildren(text("p", "No request has ended in the last five minutes.", "note"));
  const table = document.createElement("table"), head = table.createTHead().insertRow();
  for (const name of ["request", "total", "first token", "published", "per token", "tokens in", "tokens out", "limit missed in"]) head.append(text("th", name));
  head.append(text("th", "why", "words"));
  const body = table.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    const id = text("td", "");
    id.append(text("code", short(row.id)), document.createElement("br"), text("code", short(row.request_id), "quiet"));
    id.title = `id: ${row.id}\nx-request-id: ${row.request_id}`;
    line.append(id, text("td", seconds(row.e2e_s)), text("td", seconds(row.ttft_s)), text("td", seconds(row.publish_s)), text("td", seconds(row.tpot_s)),
      text("td", number(row.prompt_tokens)), text("td", number(row.output_tokens)));
    const blame = text("td", "");
    blame.append(row.blame ? text("span", row.blame, "tag") : "–");
    const words = text("td", "", "words"), details = document.createElement("details"), list = document.createElement("ul");
    details.open = open.has(row.id);
    details.addEventListener("toggle", () => details.open ? open.add(row.id) : open.delete(row.id));
    details.append(text("summary", row.reasons[0] ?? row.summary), list);
    list.append(...row.reasons.slice(1).map(reason => text("li", reason)));
    words.append(details);
    line.append(blame, words);
  }
  byId("slowest").replaceChildren(table);
}

function short(id) {
  return id.length > 18 ? id.slice(0, 17) + "…" : id;
}

poll();
