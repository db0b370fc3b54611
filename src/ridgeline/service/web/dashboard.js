import {askKey, headers, text} from "./common.js";
import {number, roofline, seconds, series} from "./charts.js";

const EVERY_MS = 1000, KEPT = 600;
const byId = id => document.getElementById(id);
const past = [];   // one reading per poll: {at, data}
let open = new Set();

async function poll() {
  try {
    const response = await fetch("dashboard/data", {headers: headers()});
    if (response.status === 401) return askKey(byId("trouble"), poll);
    if (!response.ok) throw new Error(`the server answered ${response.status}`);
    const data = await response.json();
    past.push(data);
    if (past.length > KEPT) past.shift();
    show(data);
  } catch (error) {
    byId("health").className = "dot bad";
    banner([`No news from the server: ${error.message}.`]);
  }
  setTimeout(poll, document.hidden ? 5 * EVERY_MS : EVERY_MS);
}

function banner(lines) {
  byId("trouble").replaceChildren(...lines.map(line => text("p", line, "banner")));
}

function show(data) {
  byId("health").className = `dot ${data.healthy ? "good" : "bad"}`;
  const facts = data.facts, size = facts.params ? `${number(facts.params)} parameters` : "";
  byId("model").textContent = [facts.root?.split("/").at(-1) || facts.architecture, size, facts.quantization || facts.dtype, facts.device]
    .filter(Boolean).join(" · ");
  banner([...(data.healthy ? [] : [`Not healthy: ${data.trouble}.`]), ...data.alerts.map(alert => alert.text)]);
  tiles(data);
  charts(data);
  use(data);
  slowest(data.slowest);
}

function tiles(data) {
  const now = data.now, figures = data.figures, latencies = data.latencies;
  const percent = value => value === undefined ? "–" : `${number(100 * value)} %`;
  const spread = latency => latency ? `p90 ${seconds(latency.p90)} · p99 ${seconds(latency.p99)}` : "nothing seen yet";
  const rows = [
    ["Time to first token", seconds(latencies.ttft?.p50), "median", spread(latencies.ttft)],
    ["Time per output token", seconds(latencies.tpot?.p50), "median", spread(latencies.tpot)],
    ["Tokens out", number(figures.output_tokens_per_second), "per s", `${number(figures.prompt_tokens_per_second)} in per s`],
    ["Requests", number(now.running), "running", `${number(now.waiting)} waiting · ${number(figures.requests_per_second)} ended per s`],
    figures.slo_attainment === undefined
      ? ["Goodput", "–", "", "declare limits with --slo"]
      : ["Goodput", number(figures.goodput_requests_per_second), "req/s", `${percent(figures.slo_attainment)} within ${limits(data.slo) || "their own limits"}`],
    ["Prefix cache", percent(figures.prefix_hit_rate), "hits", `${percent(now.kv_used)} of the KV cache in use`],
    figures.watts === undefined
      ? ["Power", "–", "", "not counted here"]
      : ["Power", number(figures.watts), "W", `${number(figures.joules_per_token)} J per token${data.ceilings.power === "estimate" ? ", estimated" : ""}`],
    figures.cost_per_million_tokens === undefined
      ? ["Cost", "–", "", "no price known: --price-per-hour"]
      : ["Cost", `$${number(figures.cost_per_million_tokens)}`, "per M tokens", `at $${number(data.ceilings.price)} per hour, idle time included`],
  ];
  byId("tiles").replaceChildren(...rows.map(([title, value, unit, more]) => {
    const tile = text("div", "", "tile"), figure = text("div", value, "value");
    if (unit) figure.append(" ", text("small", unit));
    tile.append(text("h3", title), figure, text("div", more, "more"));
    return tile;
  }));
}

function limits(slo) {
  return Object.entries(slo).filter(([, limit]) => limit !== null).map(([name, limit]) => `${name} ${seconds(limit)}`).join(", ");
}

function charts(data) {
  const times = past.map(one => one.at);
  const of = pick => past.map(one => pick(one) ?? NaN);
  series(byId("latency"), times, [
    {name: "TTFT p50", colour: "first", values: of(one => one.latencies.ttft?.p50)},
    {name: "p95", colour: "first", thin: true, values: of(one => one.latencies.ttft?.p95)},
    {name: "TPOT p50", colour: "second", values: of(one => one.latencies.tpot?.p50)},
    {name: "p95", colour: "second", thin: true, values: of(one => one.latencies.tpot?.p95)},
  ], {show: seconds, limits: [data.slo.ttft, data.slo.tpot].filter(limit => limit !== null)});
  series(byId("tokens"), times, [
    {name: "out", colour: "first", values: of(one => one.figures.output_tokens_per_second)},
    {name: "in", colour: "second", values: of(one => one.figures.prompt_tokens_per_second)},
  ]);
  series(byId("queue"), times, [
    {name: "running", colour: "first", values: of(one => one.now.running)},
    {name: "waiting", colour: "second", values: of(one => one.now.waiting)},
  ]);
  series(byId("cache"), times, [
    {name: "held %", colour: "first", values: of(one => 100 * one.now.kv_used)},
    {name: "kept for reuse %", colour: "third", values: of(one => 100 * one.now.kv_cached)},
    {name: "hit rate %", colour: "second", thin: true, values: of(one => 100 * one.figures.prefix_hit_rate)},
  ]);
  const top = data.ceilings, roofs = [];
  if (top.flops && top.bytes) roofs.push({name: "specification", flops: top.flops, bytes: top.bytes, colour: "quiet", thin: true});
  if (top.measured_flops && top.measured_bytes)
    roofs.push({name: "measured here", flops: top.measured_flops, bytes: top.measured_bytes, colour: "first"});
  if (roofs.length) roofline(byId("roof"), roofs, past.map(one => one.point).filter(Boolean).slice(-60));
  else byId("roofnote").textContent = "The table knows no ceilings of this device.";
}

function use(data) {
  const figures = data.figures;
  const rows = [
    ["Device busy", figures.device_busy], ["MFU", figures.mfu, "of the specified FLOP/s"], ["MBU", figures.mbu, "of the specified bytes/s"],
    ["MFU, measured", figures.mfu_measured], ["MBU, measured", figures.mbu_measured],
    ["Waits for the host", figures.bubble], ["Busy with prompts", figures.prompt_share],
  ].filter(row => row[1] !== undefined);
  const made = rows.map(([name, share]) => {
    const meter = text("div", "", "meter"), track = text("div", "", "track"), fill = document.createElement("div");
    fill.style.width = `${Math.min(100, 100 * share)}%`;
    track.append(fill);
    meter.append(text("span", name), track, text("span", `${number(100 * share)} %`, "figure"));
    return meter;
  });
  if (figures.step_prediction_error !== undefined)
    made.push(text("p", `Predicted step times are off by ${number(100 * figures.step_prediction_error)} % (median); `
      + (data.ceilings.calibration ? `calibrated ${data.ceilings.calibration}.` : "uncalibrated."), "note"));
  if (figures.input_tokens_per_output_token !== undefined)
    made.push(text("p", `One output token costs as much latency as ${number(figures.input_tokens_per_output_token)} prompt tokens.`, "note"));
  if (data.late.count)
    made.push(text("p", `${data.late.count} kernels or graphs were made while requests waited (${seconds(data.late.seconds)}); the log names them.`, "note"));
  for (const words of data.slo_broken) made.push(text("p", `The SLO is broken: ${words}.`, "note"));
  if (Object.keys(data.blamed).length)
    made.push(text("p", "Missed the SLO: " + Object.entries(data.blamed).map(([name, count]) => `${count} by ${name}`).join(", ") + ".", "note"));
  byId("use").replaceChildren(...(made.length ? made : [text("p", "No step yet.", "note")]));
}

function slowest(rows) {
  if (!rows.length) return byId("slowest").replaceChildren(text("p", "No request has ended in the last five minutes.", "note"));
  const table = document.createElement("table"), head = table.createTHead().insertRow();
  for (const name of ["request", "total", "first token", "per token", "in", "out", "to blame"]) head.append(text("th", name));
  const why = text("th", "why", "words");
  head.append(why);
  const body = table.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    const id = text("td", "");
    id.append(text("code", row.id.slice(0, 17) + "…"));
    id.title = row.id;
    line.append(id, text("td", seconds(row.e2e_s)), text("td", seconds(row.ttft_s)), text("td", seconds(row.tpot_s)),
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

poll();
