// The list of stored conversations, with a search.

import {text} from "../common.js";
import {matches, titleOf} from "./conversation.js";
import {button} from "./parts.js";

export class History {
  // store: a Store. open(id), removed(id): called when the user chooses or deletes a conversation.
  constructor(element, store, {open, removed}) {
    Object.assign(this, {store, open, removed, current: ""});
    this.list = element.querySelector("ul");
    this.search = element.querySelector("input[type=search]");
    this.search.addEventListener("input", () => this.draw());
    this.search.addEventListener("keydown", event => this.#key(event));
    this.list.addEventListener("keydown", event => this.#key(event));
    element.querySelector("#clear-all").addEventListener("click", () => this.#removeAll());
  }

  draw() {
    const query = this.search.value.trim();
    const shown = this.store.all().filter(conversation => !query || matches(conversation, query));
    this.list.replaceChildren(...shown.map(conversation => this.#row(conversation)));
    if (!shown.length) this.list.append(text("li", query ? "No conversation has these words." : "No conversations yet.", "quiet"));
  }

  #row(conversation) {
    const row = document.createElement("li"), title = titleOf(conversation);
    const choose = button(title, new Date(conversation.changed).toLocaleString(), () => this.open(conversation.id));
    choose.className = "choose";
    if (conversation.id === this.current) choose.setAttribute("aria-current", "true");
    const drop = button("×", "Delete this conversation", () => {
      if (!confirm(`Delete “${title}”?`)) return;
      this.store.remove(conversation.id);
      this.removed(conversation.id);
    });
    drop.className = "drop";
    drop.setAttribute("aria-label", `Delete ${title}`);
    row.append(choose, drop);
    return row;
  }

  #removeAll() {
    const all = this.store.all();
    if (!all.length || !confirm(`Delete all conversations (${all.length})?`)) return;
    for (const {id} of all) this.store.remove(id);
    for (const {id} of all) this.removed(id);
  }

  // Arrows walk through the results; Enter in the search opens the first.
  #key(event) {
    const rows = [...this.list.querySelectorAll(".choose")], place = rows.indexOf(document.activeElement);
    if (event.key === "ArrowDown") rows[Math.min(place + 1, rows.length - 1)]?.focus();
    else if (event.key === "ArrowUp") (rows[place - 1] ?? this.search).focus();
    else if (event.key === "Enter" && place < 0) rows[0]?.click();
    else return;
    event.preventDefault();
  }
}
