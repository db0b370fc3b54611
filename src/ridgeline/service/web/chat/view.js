// A conversation as elements: its turns, and each reply while it grows.

import {seconds} from "../charts.js";
import {text} from "../common.js";
import {figuresOf} from "./answer.js";
import {agreement, shownReply} from "./conversation.js";
import {button, copy, editor} from "./parts.js";
import {render} from "./render.js";

const unfolded = new WeakSet();  // replies whose thoughts the reader has opened

// Draw all turns into `target`; returns the views of the shown replies by reply.
// actions: editMessage(place, content), editReply(reply, content), regenerate(column), show(column, step).
export function drawConversation(target, conversation, actions) {
  const views = new Map(), {turns} = conversation;
  target.replaceChildren(...turns.flatMap((turn, place) => {
    const row = text("div", "", "replies");
    turn.columns.forEach((column, at) => {
      const view = new ReplyView(shownReply(column), replyTools(column, at, place === turns.length - 1, actions), actions);
      views.set(view.reply, view);
      row.append(view.element);
    });
    return [message(turn, content => actions.editMessage(place, content)), row, ...compared(turn)];
  }));
  return views;
}

function message(turn, save) {
  const frame = text("div", "", "message"), tools = text("div", "", "tools"), said = text("div", turn.content, "said user");
  const close = () => frame.replaceChildren(said, tools);
  const edit = button("Edit", "Change this message. What follows it is dropped, and the model answers again.", () =>
    frame.replaceChildren(editor(turn.content, "Send", save, close)));
  edit.classList.add("edit");
  tools.append(edit, button("Copy", "Copy this message", event => copy(turn.content, event.target)));
  close();
  return frame;
}

// What is said below two complete answers.
function compared({columns}) {
  const [one, other] = columns.map(shownReply);
  const complete = reply => reply.finish && !reply.error && !reply.withdrawn;
  if (!other || !complete(one) || !complete(other)) return [];
  return [text("div", agreement(one.content, other.content), "figures agreement")];
}

// Buttons that choose among the replies of a column; only at the end of a conversation, where nothing depends on the choice.
function replyTools(column, place, isLast, actions) {
  if (!isLast) return [];
  const reply = shownReply(column), {replies, shown} = column;
  const again = button(reply.error ? "Try again" : "Regenerate", "Generate another answer", () => actions.regenerate(place));
  again.classList.add("again");
  if (replies.length === 1) return [again];
  const earlier = button("‹", "Earlier answer", () => actions.show(place, -1));
  const later = button("›", "Later answer", () => actions.show(place, 1));
  earlier.disabled = shown === 0;
  later.disabled = shown === replies.length - 1;
  return [again, earlier, text("span", `${shown + 1}/${replies.length}`), later];
}

class ReplyView {
  constructor(reply, tools, actions) {
    this.reply = reply;
    this.running = false;
    this.element = text("div", "", "reply");
    this.bubble = text("div", "", "said assistant");
    this.thought = text("details", "", "thought");
    this.summary = text("summary", "");
    this.reasoning = text("div", "", "markdown");
    this.content = text("div", "", "markdown");
    this.problem = text("div", "", "problem");
    this.figures = text("div", "", "figures");
    this.tools = text("div", "", "tools");
    const edit = button("Edit", "Change this answer. The model sees it as its own words.", () => this.#edit(actions));
    edit.classList.add("edit");
    this.tools.append(button("Copy", "Copy this answer", event => copy(reply.content, event.target)), edit, ...tools);
    this.thought.open = unfolded.has(reply);
    this.thought.addEventListener("toggle", () => this.thought.open ? unfolded.add(reply) : unfolded.delete(reply));
    this.thought.append(this.summary, this.reasoning);
    this.bubble.append(this.thought, this.content, this.problem);
    this.element.append(text("div", reply.model, "who"), this.bubble, this.figures, this.tools);
    this.update();
  }

  // Show the reply's present state. Changes of a stream are drawn at most once a frame.
  update() {
    const {reply, running} = this;
    this.bubble.classList.toggle("running", running);
    this.bubble.classList.toggle("withdrawn", reply.withdrawn !== "");
    this.bubble.classList.toggle("failed", reply.error !== "");
    this.tools.hidden = running;
    this.thought.hidden = reply.reasoning === "";
    this.summary.textContent = running && !reply.content ? "Thinking…" : `Thought for ${seconds((reply.figures.thought ?? 0) / 1e3)}`;
    render(this.reasoning, reply.reasoning);
    render(this.content, reply.content || withdrawnText(reply));
    this.problem.textContent = reply.error;
    this.figures.textContent = figuresOf(reply);
  }

  schedule(drawn) {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = undefined;
      this.update();
      drawn();
    });
  }

  #edit(actions) {
    const close = () => this.bubble.replaceChildren(this.thought, this.content, this.problem);
    const save = content => { close(); actions.editReply(this.reply, content); };
    this.bubble.replaceChildren(editor(this.reply.content, "Save", save, close));
  }
}

function withdrawnText({withdrawn}) {
  if (!withdrawn) return "";
  return withdrawn === "flagged" ? "This answer was withdrawn." : "This answer was withdrawn, because it could not be judged.";
}
