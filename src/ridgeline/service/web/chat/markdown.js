// Markdown as models write it: text -> nodes, without a document. A node is a string or {tag, children, ...}. HTML in the text
// stays text. A line break in a paragraph stays one. A block without an end, as in a stream, ends with the text.

import {inline} from "./inline.js";

const FENCE = /^( *)(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t](.*))?$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])(?:([ \t]+)(.*))?$/;
const DELIMITERS = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*(?:\|[ \t]*)?$/;
const DEPTH = 12;  // of quotes and lists; what is deeper is a paragraph

// The blocks of a text. Each has `source`, its lines (equal sources have equal nodes), and `start`, where they begin in the text.
export function parse(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  let place = 0, start = 0;
  return blocks(lines, 0).map(({first, end, ...node}) => {
    for (; place < first; place++) start += lines[place].length + 1;
    return {...node, start, source: lines.slice(first, end).join("\n")};
  });
}

// Nodes with the places of their lines: from `first` to before `end`.
function blocks(lines, depth) {
  const nodes = [], readers = depth < DEPTH ? [fence, heading, rule, quote, list, table, paragraph] : [paragraph];
  for (let place = 0; place < lines.length;) {
    if (isBlank(lines[place])) {
      place++;
      continue;
    }
    for (const read of readers) {
      const found = read(lines, place, depth);
      if (!found) continue;
      const [node, end] = found;
      nodes.push({...node, first: place, end});
      place = end;
      break;
    }
  }
  return nodes;
}

// Readers: (lines, place, depth) -> [node, place after it], or null where no such block begins.

function fence(lines, place) {
  const found = FENCE.exec(lines[place]);
  if (!found) return null;
  const [, space, marks, info] = found;
  let end = place + 1;
  while (end < lines.length && !endsFence(lines[end], marks)) end++;
  const code = lines.slice(place + 1, end).map(line => line.slice(Math.min(space.length, indentOf(line))));
  return [{tag: "pre", language: info.trim().split(/\s/)[0], children: [code.join("\n")]}, end + 1];
}

function endsFence(line, marks) {
  const bare = line.trim();
  return bare.length >= marks.length && bare[0] === marks[0] && bare.split(marks[0]).every(part => part === "");
}

function heading(lines, place) {
  const found = HEADING.exec(lines[place]);
  if (!found) return null;
  let words = (found[2] ?? "").trim(), end = words.length;
  while (words[end - 1] === "#") end--;
  if (!end || words[end - 1] === " ") words = words.slice(0, end).trimEnd();
  return [{tag: `h${found[1].length}`, children: inline(words)}, place + 1];
}

function rule(lines, place) {
  return RULE.test(lines[place]) ? [{tag: "hr", children: []}, place + 1] : null;
}

function quote(lines, place, depth) {
  let end = place;
  while (end < lines.length && QUOTE.test(lines[end])) end++;
  if (end === place) return null;
  const inner = lines.slice(place, end).map(line => line.replace(QUOTE, ""));
  return [{tag: "blockquote", children: blocks(inner, depth + 1)}, end];
}

function list(lines, place, depth) {
  const first = marker(lines[place]);
  if (!first || first.indent > 3) return null;
  const items = [];
  let loose = false, end = place;
  for (let next = first; next && next.kind === first.kind && next.indent < first.indent + 2;) {
    const item = [next.text];
    let blank = false;
    for (end++; end < lines.length; end++) {
      const line = lines[end], deep = indentOf(line) >= Math.min(next.width, next.indent + 2);
      if (!isBlank(line) && !deep && (blank || startsBlock(line) || marker(line))) break;
      blank = isBlank(line);
      item.push(line.slice(Math.min(next.width, indentOf(line))));
    }
    next = end < lines.length ? marker(lines[end]) : null;
    while (item.length > 1 && isBlank(item.at(-1))) item.pop();
    items.push(item);
    loose ||= blank && next !== null && next.kind === first.kind || hasBlank(item);
  }
  const children = items.map(item => ({tag: "li", children: itemNodes(item, loose, depth)}));
  return [first.number === null ? {tag: "ul", children} : {tag: "ol", number: first.number, children}, end];
}

// The paragraphs of a tight list are bare text.
function itemNodes(item, loose, depth) {
  item[0] = item[0].replace(/^\[ \] /, "☐ ").replace(/^\[[xX]\] /, "☑ ");
  const nodes = blocks(item, depth + 1);
  return loose ? nodes : nodes.flatMap(node => node.tag === "p" ? node.children : [node]);
}

// indent: columns before the marker. width: columns before the item's text. kind: the sign that all markers of a list share.
function marker(line) {
  const found = ITEM.exec(line);
  if (!found || RULE.test(line)) return null;
  const [, , sign, space = " ", text = ""] = found, indent = indentOf(line);
  const number = sign.length > 1 ? Number.parseInt(sign, 10) : null;
  const wide = space.length > 4 ? 1 : space.length;  // code in an item: its spaces are kept
  return {indent, number, kind: sign.at(-1), width: indent + sign.length + wide, text: space.slice(wide) + text};
}

// Whether an item has a blank line outside of code. Its first line may be empty.
function hasBlank(item) {
  let marks = "";
  return item.some((line, place) => {
    if (marks) marks = endsFence(line, marks) ? "" : marks;
    else marks = FENCE.exec(line)?.[2] ?? "";
    return place > 0 && !marks && isBlank(line);
  });
}

function table(lines, place) {
  const below = lines[place + 1] ?? "";
  if (!lines[place].includes("|") || !DELIMITERS.test(below)) return null;
  const head = cells(lines[place]), sides = cells(below).map(sideOf);
  if (head.length !== sides.length) return null;
  let end = place + 2;
  while (end < lines.length && !isBlank(lines[end]) && !startsBlock(lines[end])) end++;
  const row = (tag, texts) => ({
    tag: "tr",
    children: sides.map((side, at) => ({tag, side, children: inline(texts[at] ?? "")})),
  });
  const body = lines.slice(place + 2, end).map(line => row("td", cells(line)));
  const children = [{tag: "thead", children: [row("th", head)]}, {tag: "tbody", children: body}];
  return [{tag: "table", children}, end];
}

function cells(line) {
  const parts = [""];
  const bare = line.trim();
  for (let place = 0; place < bare.length; place++) {
    if (bare[place] === "\\" && bare[place + 1] === "|") parts[parts.length - 1] += bare[++place];
    else if (bare[place] === "|") parts.push("");
    else parts[parts.length - 1] += bare[place];
  }
  if (bare.startsWith("|")) parts.shift();
  if (parts.length > 1 && isBlank(parts.at(-1))) parts.pop();
  return parts.map(part => part.trim());
}

function sideOf(delimiter) {
  if (!delimiter.endsWith(":")) return "left";
  return delimiter.startsWith(":") ? "center" : "right";
}

function paragraph(lines, place, depth) {
  let end = place + 1;
  while (end < lines.length && !isBlank(lines[end]) && !(depth < DEPTH && startsBlock(lines[end]))) end++;
  const words = lines.slice(place, end).map(line => line.trim()).join("\n");
  return [{tag: "p", children: inline(words)}, end];
}

function startsBlock(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line) && startsList(line);
}

// A number in the middle of a sentence is no list, unless it is 1.
function startsList(line) {
  const {number, text} = marker(line);
  return text !== "" && (number === null || number === 1);
}

function isBlank(line) {
  return line.trim() === "";
}

// Characters before a line's text.
function indentOf(line) {
  return line.length - line.trimStart().length;
}
