// Small elements that several parts of the chat page share.

import {text} from "../common.js";
import {sends} from "./keys.js";

export function button(label, title, press) {
  const made = text("button", label);
  made.type = "button";
  made.title = title;
  made.addEventListener("click", press);
  return made;
}

// A text field that replaces a message while it is edited. Enter saves it, Esc cancels.
export function editor(content, label, save, cancel) {
  const form = text("form", "", "editor"), field = document.createElement("textarea"), row = text("div", "", "tools");
  field.value = content;
  field.setAttribute("aria-label", "Edit the message");
  const saves = text("button", label, "primary");
  row.append(button("Cancel", "Esc", cancel), saves);
  form.append(field, row);
  form.addEventListener("submit", event => {
    event.preventDefault();
    if (field.value.trim()) save(field.value.trim());
  });
  field.addEventListener("keydown", event => {
    if (sends(event)) {
      event.preventDefault();
      form.requestSubmit();
    } else if (event.key === "Escape") {
      event.stopPropagation();
      cancel();
    }
  });
  field.addEventListener("input", () => fit(field));
  requestAnimationFrame(() => { fit(field); field.focus(); });
  return form;
}

// As high as its text, up to a part of the window.
export function fit(field) {
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight + 2, innerHeight * .4)}px`;
}

// Copy a text, and say so on the button for a moment.
export async function copy(content, pressed) {
  const label = pressed.textContent;
  pressed.textContent = await copied(content) ? "Copied" : "Not copied";
  setTimeout(() => { pressed.textContent = label; }, 1200);
}

// navigator.clipboard needs HTTPS or this machine. Elsewhere a selected text field does it.
async function copied(content) {
  if (navigator.clipboard) return navigator.clipboard.writeText(content).then(() => true, () => false);
  const field = document.createElement("textarea");
  field.value = content;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  return done;
}
