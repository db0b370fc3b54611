// What all pages share: the API key and the theme.

export function headers(more = {}) {
  const key = localStorage.getItem("ridgeline-key");
  return key ? {authorization: `Bearer ${key}`, ...more} : more;
}

// Ask for the key in `target`, keep it in this browser, then call `again`.
export function askKey(target, again) {
  if (target.querySelector("form")) return;
  const form = document.createElement("form");
  form.className = "key";
  const label = text("label", "This server requires an API key: "), field = document.createElement("input");
  Object.assign(field, {type: "password", name: "key", autocomplete: "off"});
  label.append(field);
  form.append(label, text("button", "Save in this browser", "primary"));
  form.addEventListener("submit", event => {
    event.preventDefault();
    localStorage.setItem("ridgeline-key", form.elements.key.value.trim());
    target.replaceChildren();
    again();
  });
  target.replaceChildren(form);
}

const kept = localStorage.getItem("ridgeline-theme");
if (kept) document.documentElement.dataset.theme = kept;
document.getElementById("theme").addEventListener("click", () => {
  const dark = getComputedStyle(document.documentElement).colorScheme === "dark"
    || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("ridgeline-theme", document.documentElement.dataset.theme);
});

export function text(name, content, className = "") {
  const made = document.createElement(name);
  made.textContent = content;
  if (className) made.className = className;
  return made;
}
