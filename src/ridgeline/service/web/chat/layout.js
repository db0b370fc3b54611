// The parts beside the conversation: the list of conversations and the settings.

const PARTS = ["history", "settings"];

export const isNarrow = matchMedia("(max-width: 900px)");  // there an open part covers the conversation

export function show(name) {
  narrow();
  part(name).classList.add("open");
}

export function hide(name) {
  part(name).classList.remove("open");
}

export function toggle(name) {
  if (part(name).classList.contains("open")) hide(name);
  else show(name);
}

// On a narrow screen, give the whole page to the conversation.
export function narrow() {
  if (isNarrow.matches) PARTS.forEach(hide);
}

function part(name) {
  return document.getElementById(name);
}
