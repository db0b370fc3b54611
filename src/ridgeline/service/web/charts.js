// Small SVG charts: time series and the roofline. No library, no outside resource.

const NS = "http://www.w3.org/2000/svg";
const WIDTH = 460, HEIGHT = 210, LEFT = 46, RIGHT = 10, TOP = 10, BOTTOM = 24;

export function element(name, attributes = {}, ...children) {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  for (const [scale, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]])
    if (Math.abs(value) >= scale) return trim(value / (unit === "k" ? 1e3 : scale), digits) + unit;
  return trim(value, digits);
}

function trim(value, digits) {
  return Math.abs(value) >= 100 ? Math.round(value).toString() : Number(value.toPrecision(digits)).toString();
}

export function count(value, noun) {
  return `${value} ${noun}${value === 1 ? "" : "s"}`;
}

export function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0 || value >= 1) return trim(value, 3) + " s";
  return value >= 1e-3 ? trim(value * 1e3, 3) + " ms" : trim(value * 1e6, 3) + " µs";
}

function niceCeiling(value) {
  if (!(value > 0)) return 1;
  const scale = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map(step => step * scale).find(step => step >= value * 0.999);
}

// lines: [{name, colour, thin, values}] of one length, NaN where nothing was seen; times: unix seconds.
// limits: [{name, value}], drawn as dotted lines with their names.
export function series(target, times, lines, {show = number, limits = []} = {}) {
  const svg = element("svg", {class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img",
    "aria-label": lines.map(line => line.name).join(", ")});
  const seen = lines.flatMap(line => line.values).filter(Number.isFinite);
  const top = niceCeiling(Math.max(...seen, ...limits.map(limit => limit.value).filter(value => value <= 4 * Math.max(...seen, 0)), 0));
  const first = times[0] ?? 0, span = Math.max(1, (times.at(-1) ?? 1) - first);
  const x = time => LEFT + (time - first) / span * (WIDTH - LEFT - RIGHT);
  const y = value => HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM);
  for (const part of [0, .25, .5, .75, 1]) {
    svg.append(element("line", {class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(part * top), y2: y(part * top)}));
    if (part % .5 === 0) svg.append(element("text", {x: LEFT - 6, y: y(part * top) + 4, "text-anchor": "end"}, show(part * top)));
  }
  for (const limit of limits.filter(limit => limit.value <= top)) {
    const height = y(limit.value);
    svg.append(element("line", {class: "limit", x1: LEFT, x2: WIDTH - RIGHT, y1: height, y2: height}),
      element("text", {class: "limit", x: LEFT + 4, y: height > TOP + 12 ? height - 4 : height + 12}, limit.name));
  }
  const ago = Math.round(span);
  svg.append(element("text", {x: LEFT, y: HEIGHT - 6}, ago >= 120 ? `${Math.round(ago / 60)} min ago` : `${ago} s ago`));
  svg.append(element("text", {x: WIDTH - RIGHT, y: HEIGHT - 6, "text-anchor": "end"}, "now"));
  for (const line of lines) {
    let path = "", pen = "M";
    line.values.forEach((value, place) => {
      if (!Number.isFinite(value)) { pen = "M"; return; }
      path += `${pen}${x(times[place]).toFixed(1)} ${y(value).toFixed(1)}${pen === "M" ? "h0" : ""}`;  // h0: a point alone is a dot
      pen = "L";
    });
    svg.append(element("path", {d: path, fill: "none", "stroke-linejoin": "round", "stroke-linecap": "round", ...stroke(line)}));
  }
  hover(svg, times, lines, x, show);
  const entries = lines.map(line => ({...line, words: `${line.name} ${show(line.values.findLast(Number.isFinite))}`}));
  for (const limit of limits)
    entries.push({limit: true, words: `${limit.name} ${show(limit.value)}${limit.value > top ? " (above this chart)" : ""}`});
  target.replaceChildren(svg, legend(entries));
}

// entries: [{words, colour, thin, limit}]; each with a piece of its line.
function legend(entries) {
  const made = document.createElement("div");
  made.className = "legend";
  for (const entry of entries) {
    const item = document.createElement("span"), swatch = element("svg", {width: 18, height: 8, viewBox: "0 0 18 8", "aria-hidden": "true"});
    swatch.append(element("line", {x1: 0, x2: 18, y1: 4, y2: 4, ...(entry.limit ? {class: "limit"} : stroke(entry))}));
    item.append(swatch, entry.words);
    made.append(item);
  }
  return made;
}

function stroke(line) {
  return {stroke: `var(--${line.colour})`, "stroke-width": line.thin ? 1.2 : 2, "stroke-dasharray": line.thin ? "5 3" : "none"};
}

function hover(svg, times, lines, x, show) {
  const mark = element("line", {class: "grid", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden"});
  const tip = element("text", {class: "tip", y: TOP + 4, visibility: "hidden"});
  svg.append(mark, tip);
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * WIDTH;
    let best = 0;
    times.forEach((time, place) => { if (Math.abs(x(time) - at) < Math.abs(x(times[best]) - at)) best = place; });
    if (!times.length) return;
    const left = x(times[best]), end = left > WIDTH / 2;
    mark.setAttribute("x1", left); mark.setAttribute("x2", left);
    tip.setAttribute("x", end ? left - 6 : left + 6);
    tip.setAttribute("text-anchor", end ? "end" : "start");
    tip.textContent = lines.map(line => show(line.values[best])).join(" · ");
    for (const part of [mark, tip]) part.setAttribute("visibility", "visible");
  });
  svg.addEventListener("pointerleave", () => { for (const part of [mark, tip]) part.setAttribute("visibility", "hidden"); });
}

// roofs: [{name, flops, bytes, colour, thin}] per second; trail: [[FLOPs per byte, FLOPs per second]], the newest last.
export function roofline(target, roofs, trail) {
  const svg = element("svg", {class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": "Roofline"});
  const points = trail.filter(point => point[0] > 0 && point[1] > 0);
  const ridges = roofs.map(roof => roof.flops / roof.bytes);
  const xs = [...ridges.map(ridge => ridge / 300), ...ridges.map(ridge => ridge * 10), ...points.map(point => point[0] / 2)];
  const [low, high] = [Math.log10(Math.min(...xs, .5)), Math.log10(Math.max(...xs, 1000))];
  const peak = Math.max(...roofs.map(roof => roof.flops), ...points.map(point => point[1]), 1);
  const floors = [peak * 1e-3, ...points.map(point => point[1] / 2)];
  const [bottom, top] = [Math.log10(Math.min(...floors)), Math.log10(peak * 1.6)];
  const x = value => LEFT + (Math.log10(value) - low) / (high - low) * (WIDTH - LEFT - RIGHT);
  const y = value => HEIGHT - BOTTOM - (Math.log10(value) - bottom) / (top - bottom) * (HEIGHT - TOP - BOTTOM);
  for (let power = Math.ceil(bottom); power <= top; power++) {
    svg.append(element("line", {class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(10 ** power), y2: y(10 ** power)}));
    svg.append(element("text", {x: LEFT - 6, y: y(10 ** power) + 4, "text-anchor": "end"}, number(10 ** power)));
  }
  for (let power = Math.ceil(low); power <= high; power++)
    if (x(10 ** power) < WIDTH - 90) svg.append(element("text", {x: x(10 ** power), y: HEIGHT - 8, "text-anchor": "middle"}, number(10 ** power)));
  for (const roof of roofs) {
    const ridge = roof.flops / roof.bytes, start = 10 ** low;
    const from = Math.max(start, 10 ** bottom / roof.bytes);
    svg.append(element("path", {d: `M${x(from)} ${y(roof.bytes * from)}L${x(ridge)} ${y(roof.flops)}L${x(10 ** high)} ${y(roof.flops)}`,
      fill: "none", stroke: `var(--${roof.colour})`, "stroke-width": roof.thin ? 1.3 : 2, "stroke-dasharray": roof.thin ? "5 3" : "none"}));
  }
  points.forEach((point, place) => {
    const last = place === points.length - 1;
    svg.append(element("circle", {cx: x(point[0]), cy: y(point[1]), r: last ? 6 : 2.5, fill: "var(--second)",
      opacity: last ? 1 : .15 + .5 * place / points.length}));
  });
  svg.append(element("text", {x: WIDTH - RIGHT, y: HEIGHT - 8, "text-anchor": "end"}, "FLOP/byte"));
  svg.append(element("text", {x: LEFT + 4, y: TOP + 4}, "FLOP/s"));
  const entries = [...roofs, {name: "now", colour: "second"}];
  target.replaceChildren(svg, legend(entries.map(entry => ({...entry, words: entry.name}))));
}
