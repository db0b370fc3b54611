// Keyboard: events -> names of commands. The table is what the help shows.

export const SHORTCUTS = [
  ["Enter", "send the message"],
  ["Shift+Enter", "start a new line"],
  ["Esc", "stop the answer; close what is open"],
  ["↑ in an empty message", "edit your last message"],
  ["Ctrl+K", "search the conversations"],
  ["Ctrl+Shift+O", "new chat"],
  ["Ctrl+.", "settings"],
  ["Ctrl+/", "this list"],
];

const WITH_CONTROL = {k: "search", ".": "settings", "/": "help"};

// Ctrl is ⌘ on a Mac. Keys that compose a character (input methods) are no commands.
export function commandOf({key, ctrlKey, metaKey, altKey, shiftKey, isComposing}) {
  if (isComposing || altKey) return null;
  if (key === "Escape") return "escape";
  if (!ctrlKey && !metaKey) return null;
  if (shiftKey && key.toLowerCase() === "o") return "new";
  return WITH_CONTROL[key.toLowerCase()] ?? null;
}

// Whether a key in a text field sends it. Safari ends a composition with an Enter of code 229.
export function sends({key, shiftKey, isComposing, keyCode}) {
  return key === "Enter" && !shiftKey && !isComposing && keyCode !== 229;
}
