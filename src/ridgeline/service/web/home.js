import "./common.js";

// A proxy may hide from the server under which address the browser reached it.
const {origin} = document.querySelector("main").dataset;
const address = new URL(".", location.href).href.replace(/\/$/, "");
for (const id of ["curl", "base"]) {
  const shown = document.getElementById(id);
  shown.textContent = shown.textContent.replace(origin, address);
}
