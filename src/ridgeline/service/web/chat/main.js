// The chat page: the open conversation, what runs, and which part of the page does what.

import {askKey, headers, text} from "../common.js";
import {KeyNeeded, answer, needsLoad} from "./answer.js";
import {addReply, addTurn, editMessage, messagesFor, newConversation, shownReply} from "./conversation.js";
import {History} from "./history.js";
import {SHORTCUTS, commandOf, sends} from "./keys.js";
import {hide, isNarrow, narrow, show, toggle} from "./layout.js";
import {Panel} from "./panel.js";
import {copy, fit} from "./parts.js";
import {requestBody} from "./sampling.js";
import {Store, isChat} from "./store.js";
import {drawConversation} from "./view.js";

const byId = id => document.getElementById(id);
const isTouched = matchMedia("(pointer: coarse)");  // Enter starts a new line there, since Shift+Enter cannot be typed
const store = new Store(localStorage);
const form = byId("ask"), {words} = form.elements, scroller = byId("scroller");
const archive = new History(byId("history"), store, {open: id => { location.hash = id; narrow(); }, removed});
const panel = new Panel(byId("settings"), settings => {
  conversation.settings = settings;
  keep(store.writeSettings(settings));
  if (conversation.turns.length) keep(store.write(conversation));
  showModels();
});
let conversation = newConversation(store.settings());
let views = new Map(), running = null;

// --- the open conversation ---

function open() {
  const id = location.hash.slice(1);
  if (id === conversation.id) return;
  running?.control.abort();
  conversation = (id && store.read(id)) || newConversation(store.settings());
  showSettings();
  draw();
  scroller.scrollTop = scroller.scrollHeight;
  if (!isTouched.matches) words.focus();  // a keyboard on the screen would cover the page
}

function draw() {
  views = drawConversation(byId("talk"), conversation, {
    editMessage: (place, content) => change(() => editMessage(conversation, place, content)),
    editReply(reply, content) {
      Object.assign(reply, {content, withdrawn: "", error: "", finish: "edited"});
      save();
      draw();
    },
    regenerate: place => change(() => addReply(conversation, conversation.turns.at(-1).columns[place], place), [place]),
    show(place, step) {
      conversation.turns.at(-1).columns[place].shown += step;
      save();
      draw();
    },
  });
  archive.current = conversation.id;
  archive.draw();
  byId("greeting").hidden = conversation.turns.length > 0;
  document.body.classList.toggle("comparing", conversation.turns.some(turn => turn.columns.length > 1));
}

// Change the end of the conversation, then let the models of these columns answer.
function change(edit, places) {
  if (!panel.form.checkValidity()) {
    show("settings");
    return panel.check();
  }
  if (running) return false;
  conversation.settings = panel.read();
  edit();
  save();
  if (location.hash.slice(1) !== conversation.id) location.hash = conversation.id;
  draw();
  scroller.scrollTop = scroller.scrollHeight;
  run(places ?? conversation.turns.at(-1).columns.map((_, place) => place));
  return true;
}

function save() {
  keep(store.write(conversation));
}

function keep(hadRoom) {
  if (!hadRoom) say("This browser's storage is full, so the conversation is not kept: delete some.");
}

function say(problem) {
  byId("trouble").replaceChildren(text("div", problem, "banner"));
}

function removed(id) {
  if (id === conversation.id) location.hash = "";
  archive.draw();
}

// --- answers ---

async function run(places) {
  const talk = conversation, replies = talk.turns.at(-1).columns.map(shownReply);
  const control = new AbortController();
  running = {control, talk, replies};
  byId("send").textContent = "Stop";
  byId("talk").setAttribute("aria-busy", "true");  // read aloud when it is complete
  for (const place of places) Object.assign(views.get(replies[place]), {running: true}).update();
  const answerIn = place => respond(talk, place, replies[place], control.signal);
  try {
    if (talk.settings.together) await Promise.all(places.map(answerIn));
    else for (const place of places) await answerIn(place);
  } catch (error) {
    if (!(error instanceof KeyNeeded)) throw error;
    askKey(byId("trouble"), loadModels);
  } finally {
    for (const place of places) replies[place].finish ||= "stopped";
    if (store.read(talk.id)) keep(store.write(talk));
    running = null;
    byId("send").textContent = "Send";
    byId("talk").setAttribute("aria-busy", "false");
    if (talk === conversation) draw();
    follow();
    if (panel.models.length > 1) loadModels();  // their states have changed
  }
}

async function respond(talk, place, reply, signal) {
  if (signal.aborted) return;
  reply.figures.load = panel.models.length > 1 && await needsLoad(reply.model);
  const body = requestBody(talk.settings, reply.model, messagesFor(talk, place));
  await answer(reply, body, signal, () => views.get(reply)?.schedule(follow));
}

// Keep the end in sight, unless the reader has scrolled away from it.
let follows = true;
scroller.addEventListener("scroll", () => {
  follows = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 60;
});

function follow() {
  if (follows) scroller.scrollTop = scroller.scrollHeight;
}

// --- models ---

async function loadModels() {
  const response = await fetch("v1/models", {headers: headers()}).catch(() => null);
  if (response?.status === 401) return askKey(byId("trouble"), loadModels);
  if (!response?.ok) return say("The server does not answer: reload the page when it runs.");
  const isFirst = !panel.models.length;
  panel.offer((await response.json()).data);
  if (isFirst) showSettings();
}

// A model that the server no longer lists is replaced by one that it does.
function showSettings() {
  panel.show(conversation.settings);
  if (panel.models.length) conversation.settings = panel.read();
  showModels();
}

function showModels() {
  byId("model").textContent = conversation.settings.models.filter(Boolean).join(" | ");
}

// --- events ---

const commands = {
  new() {
    location.hash = "";
    narrow();
    words.focus();
  },
  search() {
    show("history");
    archive.search.select();
  },
  settings: () => toggle("settings"),
  help: () => byId("help").showModal(),
  escape() {
    if (running) return running.control.abort();
    hide("settings");
    narrow();
    words.focus();
  },
};

form.addEventListener("submit", event => {
  event.preventDefault();
  if (running) return running.control.abort();
  const content = words.value.trim();
  if (!content || !change(() => addTurn(conversation, content))) return;
  words.value = "";
  fit(words);
});

words.addEventListener("input", () => fit(words));
words.addEventListener("keydown", event => {
  if (sends(event) && !isTouched.matches) {
    event.preventDefault();
    if (!running) form.requestSubmit();
  } else if (event.key === "ArrowUp" && !words.value) {
    event.preventDefault();
    [...document.querySelectorAll(".message .edit")].at(-1)?.click();
  }
});

addEventListener("keydown", event => {
  const command = commandOf(event);
  if (!command || byId("help").open) return;
  if (command !== "escape") event.preventDefault();
  commands[command]();
});

byId("talk").addEventListener("click", event => {
  if (event.target.matches("button.copy")) copy(event.target.closest(".code").querySelector("code").textContent, event.target);
});
byId("clear").addEventListener("click", commands.new);
byId("menu").addEventListener("click", () => toggle("history"));
byId("tune").addEventListener("click", () => toggle("settings"));
byId("keys").addEventListener("click", commands.help);
scroller.addEventListener("click", narrow);
addEventListener("hashchange", open);

// A page that goes away keeps what has arrived of an answer.
addEventListener("pagehide", () => {
  if (!running || !store.read(running.talk.id)) return;
  running.control.abort();
  for (const reply of running.replies) reply.finish ||= "stopped";
  store.write(running.talk);
});

// Another tab has changed a conversation.
addEventListener("storage", event => {
  if (!isChat(event.key)) return;
  if (event.key.endsWith(conversation.id) && !running) {
    conversation = store.read(conversation.id) ?? conversation;
    draw();
  } else archive.draw();
});

byId("shortcuts").append(...SHORTCUTS.flatMap(([keys, effect]) => [text("dt", keys), text("dd", effect)]));
if (!isNarrow.matches) show("history");
open();
loadModels();
