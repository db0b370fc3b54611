import "./common.js";

// A proxy may hide from the server under which address the browser reached it.
const page = document.querySelector("main").dataset;
for (const id of ["curl", "base"]) {
  const shown = document.getElementById(id);
  shown.textContent = shown.textContent.replace(page.origin, location.origin);
}
