// Markdown nodes -> elements. Text becomes text nodes and attributes come from a list, so no answer can add markup or a script.

import {text} from "../common.js";
import {safeAddress} from "./inline.js";
import {parse} from "./markdown.js";

const TAGS = new Set("h1 h2 h3 h4 h5 h6 p ul ol li blockquote pre hr table thead tbody tr th td a strong em del code br".split(" "));
const shown = new WeakMap();  // target -> {text, blocks} that it shows

// Show a text in `target`. Blocks whose lines are the same stay, with the reader's selection in them.
export function render(target, markdown) {
  const before = shown.get(target) ?? {text: "", blocks: []}, text = markdown.replace(/\r\n?/g, "\n");
  const blocks = grown(before, text);
  blocks.forEach((block, place) => {
    if (before.blocks[place]?.source === block.source) return;
    const made = element(block), earlier = target.children[place];
    if (earlier) earlier.replaceWith(made);
    else target.append(made);
  });
  while (target.children.length > blocks.length) target.lastElementChild.remove();
  shown.set(target, {text, blocks});
}

// The blocks of a text. Where it continues an earlier one, as in a stream, only the last two blocks are read again: the line
// that has not ended may belong to either.
function grown({text: earlier, blocks}, text) {
  if (blocks.length < 3 || !text.startsWith(earlier)) return parse(text);
  const start = blocks.at(-2).start;
  return [...blocks.slice(0, -2), ...parse(text.slice(start)).map(block => ({...block, start: block.start + start}))];
}

function element(node) {
  if (typeof node === "string") return document.createTextNode(node);
  if (node.tag === "pre") return codeBlock(node);
  if (!TAGS.has(node.tag)) throw new Error(`No element for ${node.tag}.`);
  const made = document.createElement(node.tag);
  if (node.tag === "a" && safeAddress(node.address)) {
    Object.assign(made, {href: node.address, title: node.address, target: "_blank", rel: "noopener noreferrer nofollow"});
  }
  if (node.tag === "ol") made.start = node.number;
  if (node.side) made.className = node.side;
  made.append(...node.children.map(element));
  if (node.tag !== "table") return made;
  const frame = text("div", "", "scroll");
  frame.append(made);
  return frame;
}

function codeBlock({language, children}) {
  const block = text("div", "", "code"), bar = text("div", "", "bar"), pre = document.createElement("pre");
  const copy = text("button", "Copy", "copy");
  copy.type = "button";
  bar.append(text("span", language), copy);
  pre.append(text("code", children[0]));
  block.append(bar, pre);
  return block;
}
