// The settings panel: a form <-> the settings of a conversation.

import {text} from "../common.js";
import {EFFORTS, NUMBERS, readSettings} from "./sampling.js";

export class Panel {
  // changed(settings): called after every change that is valid.
  constructor(form, changed) {
    this.form = form;
    this.models = [];
    form.querySelector("#numbers").append(...NUMBERS.map(numberField));
    form.elements.effort.append(option("", "default"), ...EFFORTS.map(name => option(name, name)));
    form.addEventListener("input", () => {
      this.#compares();
      if (form.checkValidity()) changed(this.read());
    });
    form.addEventListener("submit", event => event.preventDefault());
  }

  // The models that can be chosen: entries of /v1/models. Those that are chosen stay.
  offer(models) {
    const {first, second} = this.form.elements, chosen = [first.value, second.value];
    this.models = models;
    const label = ({id, state}) => state && state !== "awake" ? `${id} (${state})` : id;
    const choices = () => models.map(model => option(model.id, label(model)));
    first.replaceChildren(...choices());
    second.replaceChildren(option("", "none"), ...choices());
    [first.value, second.value] = chosen;
  }

  show(settings) {
    const {elements} = this.form, [first, second = ""] = settings.models;
    const isOffered = name => this.models.some(({id}) => id === name);
    elements.first.value = isOffered(first) ? first : this.models[0]?.id ?? "";
    elements.second.value = isOffered(second) ? second : "";
    elements.together.checked = settings.together;
    elements.system.value = settings.system;
    elements.stop.value = settings.stop;
    elements.effort.value = settings.effort;
    for (const {name} of NUMBERS) elements[name].value = settings.numbers[name] ?? "";
    this.#compares();
  }

  read() {
    const {elements} = this.form, numbers = NUMBERS.map(({name}) => [name, elements[name].valueAsNumber]);
    return readSettings({
      models: [elements.first.value, elements.second.value].filter((name, place) => place === 0 || name),
      together: elements.together.checked,
      system: elements.system.value,
      numbers: Object.fromEntries(numbers),
      stop: elements.stop.value,
      effort: elements.effort.value,
    });
  }

  // Whether all fields can be sent; shows the first that cannot.
  check() {
    return this.form.reportValidity();
  }

  #compares() {
    this.form.querySelector("#compares").hidden = !this.form.elements.second.value;
  }
}

function numberField({name, min, max, step, about}) {
  const label = text("label", name.replaceAll("_", " ")), field = document.createElement("input");
  Object.assign(field, {type: "number", name, min, max, step, placeholder: "default", title: about});
  label.append(field);
  return label;
}

function option(value, label) {
  const made = text("option", label);
  made.value = value;
  return made;
}
