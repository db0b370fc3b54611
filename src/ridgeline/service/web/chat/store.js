// Conversations and settings in this browser's storage: an entry for each conversation, so that two tabs do not overwrite each
// other's. `storage` has the methods of localStorage.

import {readConversation} from "./conversation.js";
import {readSettings} from "./sampling.js";

const CHAT = "ridgeline-chat:", SETTINGS = "ridgeline-chat-settings";

export class Store {
  constructor(storage) {
    this.storage = storage;
  }

  // All conversations, the newest first. Entries that cannot be read are skipped.
  all() {
    const keys = Array.from({length: this.storage.length}, (_, place) => this.storage.key(place));
    const kept = keys.filter(isChat).map(key => this.read(key.slice(CHAT.length))).filter(Boolean);
    return kept.sort((one, other) => other.changed - one.changed);
  }

  read(id) {
    return readConversation(this.#json(CHAT + id));
  }

  // Returns whether there was room.
  write(conversation) {
    conversation.changed = Date.now();
    return this.#set(CHAT + conversation.id, conversation);
  }

  remove(id) {
    this.storage.removeItem(CHAT + id);
  }

  // Settings that a new conversation starts with: the last ones.
  settings() {
    return readSettings(this.#json(SETTINGS));
  }

  writeSettings(settings) {
    return this.#set(SETTINGS, settings);
  }

  #json(key) {
    try {
      return JSON.parse(this.storage.getItem(key));
    } catch {
      return null;
    }
  }

  #set(key, value) {
    try {
      this.storage.setItem(key, JSON.stringify(value));
      return true;
    } catch {
      return false;
    }
  }
}

export function isChat(key) {
  return key !== null && key.startsWith(CHAT);
}
