import {askKey, headers, text} from "./common.js";

const byId = id => document.getElementById(id);
let api = null;

async function load() {
  try {
    const response = await fetch("openapi.json", {headers: headers()});
    if (!response.ok) throw new Error(`the server answered ${response.status}`);
    api = await response.json();
  } catch (error) {
    return byId("trouble").replaceChildren(text("p", `Cannot read /openapi.json: ${error.message}.`, "banner"));
  }
  byId("model").textContent = `${api.info.title} · version ${api.info.version}`;
  intro();
  const operations = Object.entries(api.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => ({path, method, operation})));
  for (const tag of api.tags) {
    byId("routes").append(text("h2", tag.name[0].toUpperCase() + tag.name.slice(1)), text("p", tag.description));
    byId("routes").append(...operations.filter(entry => entry.operation.tags.includes(tag.name)).map(route));
  }
  const linked = location.hash && document.getElementById(location.hash.slice(1));
  if (linked) { linked.open = true; linked.scrollIntoView(); }
}

function intro() {
  const made = byId("intro"), link = document.createElement("a");
  link.href = "openapi.json";
  link.textContent = "/openapi.json";
  const file = text("p", "The same description for programs, in OpenAPI 3.1: ");
  file.append(link, ".");
  made.append(text("h1", "API"), text("p", api.info.description), file);
  for (const scheme of Object.values(api.components.securitySchemes))
    made.append(text("p", `${scheme.type === "http" ? "authorization: Bearer KEY" : `${scheme.name}: KEY`} – ${scheme.description}`, "note"));
}

function resolve(schema) {
  return schema?.$ref ? api.components.schemas[schema.$ref.split("/").at(-1)] : schema ?? {};
}

function route({path, method, operation}) {
  const made = document.createElement("details"), summary = document.createElement("summary");
  made.className = "route panel";
  made.id = operation.operationId;
  summary.append(text("span", method.toUpperCase(), "tag"), text("code", path), text("span", operation.summary, "note"));
  made.append(summary);
  if (operation.description) made.append(text("p", operation.description));
  if (operation.parameters) made.append(text("h3", "Parameters"), fields(operation.parameters.map(parameter =>
    [parameter.name, `${parameter.in}, ${kind(parameter.schema)}`, parameter.description])));
  const json = operation.requestBody?.content["application/json"], sent = Object.values(operation.requestBody?.content ?? {})[0];
  const body = resolve(sent?.schema);
  if (body.properties) made.append(...members(body));
  made.append(text("h3", "Answers"), fields(Object.entries(operation.responses).map(([status, response]) =>
    [status, Object.keys(response.content ?? {}).join(", "), response.description])));
  if (operation.tags[0] !== "pages" && (json || !sent)) made.append(attempt(path, method, operation));
  return made;
}

// The fields of a body: those that are honoured, then those that are refused, with the reason.
function members(body) {
  const all = Object.entries(body.properties), required = new Set(body.required ?? []);
  const honoured = all.filter(([, schema]) => !("x-ridgeline-refused" in schema));
  const refused = all.filter(([, schema]) => "x-ridgeline-refused" in schema);
  const made = [text("h3", "Fields"), fields(honoured.map(([name, schema]) =>
    [name, kind(schema) + (required.has(name) ? ", required" : ""), schema.description ?? "", schema.examples]))];
  if (refused.length) made.push(text("h3", "Fields that are refused"), fields(refused.map(([name, schema]) =>
    [name, schema.enum ? `only ${kind(schema)}` : "must be left out", schema.description])));
  return made;
}

// rows: [name, kind, words, examples]
function fields(rows) {
  const scroll = text("div", "", "scroll"), table = text("table", "", "fields"), body = table.createTBody();
  for (const [name, type, words, examples] of rows) {
    const line = body.insertRow(), cell = text("td", "");
    cell.append(text("code", name));
    const last = text("td", words);
    if (examples?.length) last.append(" ", text("span", "Examples:", "quiet"), " ",
      text("code", examples.map(value => JSON.stringify(value)).join("  ")));
    line.append(cell, text("td", type, "quiet"), last);
  }
  scroll.append(table);
  return scroll;
}

// A schema in words; of several: as the items of a list.
function kind(schema, several = false) {
  if (schema.$ref) return kind(resolve(schema), several);
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.filter(value => value !== null).map(value => JSON.stringify(value)).join(", ");
  if (schema.anyOf) return [...new Set(schema.anyOf.map(option => kind(option, several)))].filter(words => words !== "nothing").join(" or ");
  const types = [schema.type ?? "any"].flat().filter(type => type !== "null");
  if (!types.length) return "nothing";
  const words = types.map(type => type === "array" ? `list${several ? "s" : ""} of ${kind(schema.items ?? {}, true)}` : several ? `${type}s` : type);
  return words.join(" or ") + (several ? "" : range(schema));
}

// The limits of a number, a text or a list in words; those of all whole numbers say nothing.
function range(schema) {
  const shown = value => Math.abs(value) >= 2 ** 31 - 1 ? undefined : value;
  const low = shown(schema.minimum ?? schema.minItems), high = shown(schema.maximum ?? schema.maxItems ?? schema.maxLength);
  const unit = schema.maxLength ? " characters" : schema.maxItems ? " items" : "";
  const parts = [];
  if (schema.exclusiveMinimum !== undefined) parts.push(`above ${schema.exclusiveMinimum}`);
  if (low !== undefined && high !== undefined) return `, ${low} to ${high}${unit}`;
  if (low !== undefined) parts.push(`at least ${low}`);
  if (high !== undefined) parts.push(`at most ${high}${unit}`);
  return parts.length ? `, ${parts.join(", ")}` : "";
}

// A form that sends the request from this page. Only bodies of JSON can be written in it.
function attempt(path, method, operation) {
  const made = document.createElement("form"), row = text("div", "", "row"), output = text("pre", "");
  made.className = "try";
  output.hidden = true;
  output.setAttribute("aria-live", "polite");
  const inputs = (operation.parameters ?? []).filter(parameter => parameter.in !== "header").map(parameter => {
    const label = text("label", `${parameter.name} `), input = document.createElement("input");
    input.required = parameter.required;
    input.dataset.place = parameter.in;
    input.name = parameter.name;
    label.append(input);
    row.append(label);
    return input;
  });
  const example = operation.requestBody?.content["application/json"]?.example;
  const area = document.createElement("textarea");
  area.value = JSON.stringify(example, null, 2);
  area.setAttribute("aria-label", "Body of the request");
  area.spellcheck = false;
  const send = text("button", "Send", "primary"), status = text("span", "");
  row.append(send, status);
  made.append(text("h3", "Try it"), ...(example ? [area] : []), row, output);
  made.addEventListener("submit", async event => {
    event.preventDefault();
    send.disabled = true;
    output.hidden = false;
    output.textContent = "";
    status.textContent = "…";
    try {
      const response = await fetch(address(path, inputs), {method: method.toUpperCase(),
        headers: headers(example || method === "post" ? {"content-type": "application/json"} : {}),
        ...(example ? {body: area.value} : {})});
      status.textContent = `${response.status} ${response.statusText} · x-request-id ${response.headers.get("x-request-id")}`;
      await show(response, output);
      if (response.status === 401) askKey(byId("trouble"), () => {});
    } catch (error) {
      status.textContent = `The request failed: ${error.message}.`;
    }
    send.disabled = false;
  });
  return made;
}

function address(path, inputs) {
  const query = new URLSearchParams();
  for (const input of inputs) {
    if (input.dataset.place === "path") path = path.replace(`{${input.name}}`, encodeURIComponent(input.value));
    else if (input.value) query.set(input.name, input.value);
  }
  return query.size ? `.${path}?${query}` : `.${path}`;
}

// Text as it arrives; JSON is indented at its end.
async function show(response, output) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const {value, done} = await reader.read();
    if (done) break;
    output.textContent += value;
    output.scrollTop = output.scrollHeight;
  }
  if (response.headers.get("content-type")?.startsWith("application/json"))
    output.textContent = JSON.stringify(JSON.parse(output.textContent), null, 2);
}

load();
