// Markdown inside of a paragraph: text -> nodes. A node is a string or {tag, children, ...}. The time is linear in the text's
// length: every search for an end either succeeds or is not repeated.

// At most nine spaces in a row: beside an empty address, parts that take any number would try all divisions among them.
const LINK = /\(\s{0,9}<?([^\s()<>]+(?:\([^\s()<>]*\)[^\s()<>]*)*)>?(?:\s{1,9}"[^"\n]*")?\s{0,9}\)/y;
const ADDRESS = /https?:\/\/[^\s<>"`]+/y;
const PLAIN = /[^\\`*_~[\]!<\nh]+/y;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}]/u;
const SCRIPT = /[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Hangul}]/u;  // written without spaces
const DEPTH = 32;

export function inline(text) {
  return new Inline(text).read();
}

// The address of a link, or null if a click on it must not open it.
export function safeAddress(address) {
  return /^(?:https?:\/\/|mailto:)/i.test(address) ? address : null;
}

class Inline {
  #out = [];  // nodes, and marks that may become emphasis: {mark, count}
  #openers = {"*": [], _: [], "~": []};  // places in #out of marks that may open
  #brackets = [];  // places in #out of "["
  #place = 0;

  constructor(text) {
    this.text = text;
    this.ticks = ticks(text);
  }

  read() {
    while (this.#place < this.text.length) this.#step(this.text[this.#place]);
    return joined(this.#out);
  }

  #step(sign) {
    const {text} = this, next = text[this.#place + 1] ?? "";
    if (sign === "\\" && PUNCTUATION.test(next)) return this.#add(next, 2);
    if (sign === "\n" || (sign === "\\" && next === "\n")) return this.#add({tag: "br", children: []}, sign === "\n" ? 1 : 2);
    if (sign === "`") return this.#code();
    if (sign === "*" || sign === "_" || sign === "~") return this.#emphasis(sign);
    if (sign === "!" && next === "[") return this.#bracket(2);
    if (sign === "[") return this.#bracket(1);
    if (sign === "]") return this.#link();
    if (sign === "<" || sign === "h") return this.#address(sign);
    PLAIN.lastIndex = this.#place;
    const plain = PLAIN.exec(text)?.[0] ?? sign;
    this.#add(plain, plain.length);
  }

  #add(node, length) {
    this.#out.push(node);
    this.#place += length;
  }

  #code() {
    const [count, end] = this.ticks.get(this.#place);
    if (end === undefined) return this.#add("`".repeat(count), count);
    let code = this.text.slice(this.#place + count, end).replace(/\n/g, " ");
    if (code.length > 2 && code.startsWith(" ") && code.endsWith(" ")) code = code.slice(1, -1);
    this.#add({tag: "code", children: [code]}, end + count - this.#place);
  }

  // CommonMark's rules of flanking, and of lengths that are multiples of 3. Scripts without spaces count as punctuation.
  #emphasis(mark) {
    const {text} = this, start = this.#place;
    let end = start;
    while (text[end] === mark) end++;
    this.#place = end;
    const count = end - start, before = kind(lastCharacter(text, start)), after = kind(firstCharacter(text, end));
    const left = after !== "space" && (after === "word" || before !== "word");
    const right = before !== "space" && (before === "word" || after !== "word");
    const opens = left && (mark !== "_" || !right || before !== "word");
    const closes = right && (mark !== "_" || !left || after !== "word");
    if (count > 3 || (mark === "~" && count !== 2)) return void this.#out.push(text.slice(start, end));
    const rest = closes ? this.#close(mark, count, opens) : count;
    if (!rest) return;
    if (opens && this.#openers[mark].length < DEPTH) {
      this.#openers[mark].push(this.#out.length);
      this.#out.push({mark, count: rest, both: closes});
    } else this.#out.push(mark.repeat(rest));
  }

  // Ends what earlier marks have opened; returns how many of `count` marks are left.
  #close(mark, count, both) {
    const openers = this.#openers[mark];
    while (count) {
      const fits = place => {
        const opener = this.#out[place];
        return !(both || opener.both) || (opener.count + count) % 3 !== 0 || count % 3 === 0;
      };
      const place = openers.findLast(fits);
      if (place === undefined) break;
      const opener = this.#out[place], used = Math.min(opener.count, count, 2);
      const children = this.#take(place + 1);
      opener.count -= used;
      count -= used;
      if (!opener.count) {
        openers.pop();
        this.#out.pop();
      }
      this.#out.push({tag: mark === "~" ? "del" : used === 2 ? "strong" : "em", children});
    }
    return count;
  }

  // Remove what stands from `place` on; returns it as nodes.
  #take(place) {
    for (const places of [...Object.values(this.#openers), this.#brackets]) while (places.at(-1) >= place) places.pop();
    return joined(this.#out.splice(place));
  }

  #bracket(length) {
    this.#brackets.push(this.#out.length);
    this.#add(length === 2 ? "![" : "[", length);
  }

  // An image is a link to it: nothing that an answer names is loaded.
  #link() {
    const place = this.#brackets.pop();
    LINK.lastIndex = this.#place + 1;
    const found = place === undefined ? null : LINK.exec(this.text);
    const address = found && safeAddress(found[1]);
    if (!address) return this.#add("]", 1);
    const children = this.#take(place);
    children[0] = children[0].replace(/^!?\[/, "");
    this.#brackets = [];  // links contain no links
    this.#add({tag: "a", address, children: children.join("") === "" ? [address] : children}, found[0].length + 1);
  }

  #address(sign) {
    const {text} = this, start = this.#place;
    ADDRESS.lastIndex = sign === "<" ? start + 1 : start;
    const starts = sign === "<" || !WORD.test(text[start - 1] ?? "");
    const found = starts ? ADDRESS.exec(text)?.[0] : null;
    if (!found) return this.#add(sign, 1);
    if (sign === "<") {
      if (text[start + 1 + found.length] !== ">") return this.#add(sign, 1);
      return this.#add({tag: "a", address: found, children: [found]}, found.length + 2);
    }
    const address = withoutEnd(found);
    this.#add({tag: "a", address, children: [address]}, address.length);
  }
}

// Start of each run of backticks -> [its length, the place of the next run of that length].
function ticks(text) {
  const runs = new Map(), last = new Map();
  for (const {0: run, index} of text.matchAll(/`+/g)) {
    const earlier = last.get(run.length);
    if (earlier !== undefined) runs.get(earlier)[1] = index;
    last.set(run.length, index);
    runs.set(index, [run.length]);
  }
  return runs;
}

function firstCharacter(text, place) {
  return place < text.length ? String.fromCodePoint(text.codePointAt(place)) : "";
}

function lastCharacter(text, place) {
  const pair = place > 1 && /[\uDC00-\uDFFF]/.test(text[place - 1]);
  return text.slice(Math.max(0, place - (pair ? 2 : 1)), place);
}

function kind(character) {
  if (character === "" || /\s/.test(character)) return "space";
  return WORD.test(character) && !SCRIPT.test(character) ? "word" : "punctuation";
}

// An address without punctuation that belongs to the sentence around it.
function withoutEnd(address) {
  const strange = address.includes("(") ? ".,;:!?'*_~]" : ".,;:!?'*_~])";
  let end = address.length;
  while (strange.includes(address[end - 1])) end--;
  return address.slice(0, end);
}

// Marks that were not used are text; neighbouring strings become one.
function joined(items) {
  const nodes = [];
  for (const item of items) {
    const node = item.mark ? item.mark.repeat(item.count) : item;
    if (typeof node === "string" && typeof nodes.at(-1) === "string") nodes[nodes.length - 1] += node;
    else nodes.push(node);
  }
  return nodes;
}
