// A conversation: plain values, which are stored as JSON.
//
// {id, changed, settings, turns: [{content, columns: [{shown, replies: [reply]}]}]}
//
// A turn is a message of the user and its answers: a column for each model, and in it a reply for each time it was generated.

import {readSettings} from "./sampling.js";

const TITLE = 60;

export function newConversation(settings) {
  const random = crypto.getRandomValues(new Uint32Array(2));
  return {id: [Date.now(), ...random].map(part => part.toString(36)).join("-"), changed: 0, settings, turns: []};
}

// The stored value as a conversation, or null if it is none.
export function readConversation(value) {
  const isReply = reply => typeof reply?.content === "string" && typeof reply.reasoning === "string";
  const isColumn = column => Array.isArray(column?.replies) && column.replies.every(isReply) && column.shown in column.replies;
  const isTurn = turn => typeof turn?.content === "string" && Array.isArray(turn.columns) && turn.columns.every(isColumn);
  const isWhole = typeof value?.id === "string" && Array.isArray(value.turns) && value.turns.every(isTurn);
  return isWhole ? {id: value.id, changed: Number(value.changed) || 0, settings: readSettings(value.settings), turns: value.turns} : null;
}

export function titleOf(conversation) {
  const words = (conversation.turns[0]?.content ?? "").trim().replace(/\s+/g, " ");
  return words.length > TITLE ? `${words.slice(0, TITLE)}…` : words || "New chat";
}

// Whether all words of a query occur in the conversation.
export function matches(conversation, query) {
  const texts = conversation.turns.flatMap(turn => [turn.content, ...turn.columns.map(column => shownReply(column).content)]);
  const text = texts.join("\n").toLowerCase();
  return query.toLowerCase().split(/\s+/).every(word => text.includes(word));
}

export function newReply(model) {
  return {model, content: "", reasoning: "", finish: "", error: "", withdrawn: "", figures: {}};
}

export function shownReply(column) {
  return column.replies[column.shown];
}

export function addTurn(conversation, content) {
  const columns = conversation.settings.models.map(model => ({shown: 0, replies: [newReply(model)]}));
  conversation.turns.push({content, columns});
}

// A new reply beside those that the column has.
export function addReply(conversation, column, place) {
  const {models} = conversation.settings;
  column.replies.push(newReply(models[place] ?? models[0]));
  column.shown = column.replies.length - 1;
}

// Replace a message of the user. What follows it goes, because it answered other words.
export function editMessage(conversation, place, content) {
  conversation.turns.splice(place);
  addTurn(conversation, content);
}

// The messages before the answer in a column of the last turn. A model sees its own answers where it has some. A turn without
// a text of the model is left out as a whole, since templates expect user and assistant in alternation.
export function messagesFor(conversation, place) {
  const {turns, settings} = conversation;
  const system = settings.system.trim() ? [{role: "system", content: settings.system}] : [];
  const earlier = turns.slice(0, -1).flatMap(turn => {
    const {content} = shownReply(turn.columns[place] ?? turn.columns[0]);
    return content ? [{role: "user", content: turn.content}, {role: "assistant", content}] : [];
  });
  return [...system, ...earlier, {role: "user", content: turns.at(-1).content}];
}

// How far two answers agree, in a sentence.
export function agreement(first, second) {
  if (first === second) return "Both answers are equal.";
  const [one, other] = [first, second].map(text => text.split(/\s+/).filter(Boolean));
  let same = 0;
  while (same < Math.min(one.length, other.length) && one[same] === other[same]) same++;
  if (!same) return "The answers differ from the first word on.";
  return `The answers agree in their first ${same} words of ${one.length} and ${other.length}.`;
}
