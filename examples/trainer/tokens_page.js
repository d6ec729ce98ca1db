"use strict";

const { samples, columns } = JSON.parse(document.getElementById("data").textContent);
const steps = [...new Set(samples.map((sample) => sample.step))];
const scales = new Map();
const trains = (step) => samples.some((sample) => sample.step === step && sample.reasons.includes(""));
const state = { column: columns[0]?.[0], step: steps.findLast(trains) ?? steps.at(-1), sample: "all", off: new Set() };
let seen = null; // the element of the token whose numbers are shown

// Texts come from a model: they are only ever set as text, never as markup.
function make(tag, properties = {}, ...children) {
  const { role, label, ...others } = properties;
  const element = Object.assign(document.createElement(tag), others);
  if (role) element.setAttribute("role", role);
  if (label) element.setAttribute("aria-label", label);
  element.append(...children);
  return element;
}

const nameOf = (reason) => reason || "trained";
const labelOf = (name) => columns.find(([column]) => column === name)[1];

function shown(text, id) {
  if (text === "") return `\u27e8${id}\u27e9`;
  if (text.trim() === "") text = text.replaceAll(" ", "\u2423");
  text = text.replaceAll("\n", "\u23ce\n").replaceAll("\t", "\u21e5");
  // characters that are not seen, or that change the order of others
  return text.replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Co}]/gu, (c) => (c === "\n" ? c : `\u27e8U+${c.codePointAt(0).toString(16)}\u27e9`));
}

function number(x) {
  if (x === null) return "not finite";
  if (x === undefined) return "\u2013";
  return (x !== 0 && Math.abs(x) < 1e-3 ? x.toExponential(2) : String(Number(x.toPrecision(4)))).replaceAll("-", "\u2212");
}

// How far a value is from what changes nothing: 1 for ratios, whose logs are compared, else 0.
function distance(name, x) {
  if (x === null || x === undefined) return 0;
  return name === "ratio" ? (x > 0 ? Math.log(x) : 0) : x;
}

// The distance that has the full colour: that of all but the largest 2% of the tokens with a loss, on all of the page.
function scaleOf(name) {
  if (!scales.has(name)) {
    const all = samples.flatMap((s) => (s.values[name] ?? []).filter((_, i) => s.mask[i]).map((x) => Math.abs(distance(name, x))));
    all.sort((a, b) => a - b);
    scales.set(name, all[Math.ceil(0.98 * all.length) - 1] || all.at(-1) || 0);
  }
  return scales.get(name);
}

function colour(share) {
  const strength = Math.round(100 * Math.sqrt(Math.min(Math.abs(share), 1))); // so that small shares can be told from 0
  return `color-mix(in srgb, ${share < 0 ? "#6baed6" : "#fd9a4b"} ${strength}%, #fff)`;
}

function chosen() {
  const of = samples.filter((sample) => sample.step === state.step);
  return state.sample === "all" ? of : of.filter((sample) => String(sample.id) === state.sample);
}

function select(id, text, options, value, change) {
  const list = make("select", { id });
  for (const [key, told] of options) list.append(make("option", { value: key, textContent: told }));
  list.value = value;
  list.addEventListener("change", () => change(list.value));
  return make("label", {}, `${text} `, list);
}

function drawControls() {
  const goTo = (step) => {
    state.step = step;
    state.sample = "all";
    draw();
  };
  const button = (id, told, label, by) => {
    const to = steps[steps.indexOf(state.step) + by];
    const found = make("button", { id, type: "button", textContent: told, label, disabled: to === undefined });
    found.addEventListener("click", () => goTo(to));
    return found;
  };
  const of = samples.filter((sample) => sample.step === state.step);
  const ids = [["all", "all"], ...of.map((s) => [String(s.id), `${s.id}, reward ${number(s.reward ?? undefined)}`])];
  const controls = make(
    "div",
    { className: "controls" },
    select("column", "Colour by", columns, state.column, (value) => { state.column = value; draw(); }),
    make(
      "span",
      {},
      select("step", "Step", steps.map((step) => [step, step]), state.step, (value) => goTo(Number(value))),
      " ",
      button("back", "\u2039", "the step before", -1),
      button("next", "\u203a", "the next step", 1),
    ),
    select("sample", "Sample", ids, state.sample, (value) => { state.sample = value; draw(); }),
  );
  const counts = new Map();
  for (const sample of samples) for (const reason of sample.reasons) counts.set(reason, 0);
  for (const sample of chosen()) for (const reason of sample.reasons) counts.set(reason, counts.get(reason) + 1);
  const reasons = make("fieldset", {}, make("legend", { textContent: "Tokens by the reason why the policy term does not train them; clear a box to dim them" }));
  for (const [reason, count] of [...counts].sort()) {
    const box = make("input", { type: "checkbox", checked: !state.off.has(reason) });
    box.addEventListener("change", () => {
      state.off[box.checked ? "delete" : "add"](reason);
      drawSamples();
    });
    reasons.append(make("label", {}, box, ` ${nameOf(reason)} (${count})`));
  }
  controls.append(reasons);
  return controls;
}

function drawLegend() {
  const scale = scaleOf(state.column);
  if (!scale) return make("p", { textContent: `${labelOf(state.column)} colours no token: it is ${state.column === "ratio" ? 1 : 0} for all` });
  const value = (share) => (state.column === "ratio" ? Math.exp(share * scale) : share * scale);
  const bar = make("span", { className: "bar" });
  bar.style.background = `linear-gradient(to right, ${[...Array(17).keys()].map((i) => colour(i / 8 - 1)).join(", ")})`;
  const [low, middle, high] = [-1, 0, 1].map((share) => number(value(share)));
  const marks = `underlined: above ${middle}, dotted: below, waved: not finite; dashed frame: not trained by the policy term; grey: no loss`;
  const scaled = make("div", { className: "legend" }, `${low} or less`, bar, `${high} or more`);
  return make("div", {}, scaled, make("small", { textContent: marks }));
}

function token(sample, at) {
  const element = make("span", { role: "option", tabIndex: -1, textContent: shown(sample.text[at], sample.tokens[at]) });
  element.addEventListener("mouseenter", () => look(sample, at, element));
  element.addEventListener("focus", () => look(sample, at, element));
  return element;
}

function paint(element, sample, at) {
  const reason = sample.reasons[at];
  const [off, out] = [state.off.has(reason), !sample.mask[at]];
  const share = off || out ? 0 : distance(state.column, sample.values[state.column]?.[at]) / (scaleOf(state.column) || 1);
  const bad = !off && !out && sample.values[state.column]?.[at] === null;
  const kinds = [["up", share > 0], ["down", share < 0], ["bad", bad], ["still", !off && !out && reason], ["out", out], ["off", off]];
  element.className = kinds.filter(([, holds]) => holds).map(([kind]) => kind).join(" ");
  element.style.background = share ? colour(share) : "";
  const told = out ? "no loss" : `${labelOf(state.column)} ${number(sample.values[state.column]?.[at])}`;
  element.setAttribute("aria-label", `${element.textContent}, ${told}, ${nameOf(reason)}`);
}

function drawSamples() {
  const list = document.getElementById("samples");
  list.replaceChildren();
  seen = null;
  for (const sample of chosen()) {
    const of = (sample.values.contribution ?? []).filter((_, i) => sample.mask[i]);
    const trained = sample.reasons.filter((reason) => reason === "").length;
    const told = [sample.group === null ? "" : `group ${sample.group}`, `reward ${number(sample.reward ?? undefined)}`];
    told.push(`${trained} of ${sample.mask.filter(Boolean).length} tokens trained by the policy term`);
    if (of.length) told.push(`contributions sum to ${number(of.reduce((a, b) => a + b, 0))}`);
    const heading = make("h2", {}, `Sample ${sample.id} `, make("small", { textContent: told.filter(Boolean).join(", ") }));
    const box = make("div", { className: "tokens", role: "listbox", label: `tokens of sample ${sample.id}` });
    if (sample.before) box.append(make("span", { role: "presentation", className: "out", textContent: shown(sample.before, "") }));
    const elements = sample.tokens.map((_, at) => token(sample, at));
    elements.forEach((element, at) => paint(element, sample, at));
    const first = Math.max(sample.mask.indexOf(true), 0);
    if (elements.length) elements[first].tabIndex = 0;
    box.append(...elements);
    box.addEventListener("keydown", (event) => move(event, elements));
    list.append(make("section", {}, heading, box));
    if (seen === null && elements.length) look(sample, first, elements[first]);
  }
  const kept = new URLSearchParams({ step: state.step, sample: state.sample, column: state.column });
  for (const reason of state.off) kept.append("off", reason);
  history.replaceState(null, "", `#${kept}`);
}

function move(event, elements) {
  const at = elements.indexOf(document.activeElement);
  const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: elements.length - 1 }[event.key];
  if (at < 0 || to === undefined || !elements[to]) return;
  event.preventDefault();
  elements[at].tabIndex = -1;
  elements[to].tabIndex = 0;
  elements[to].focus();
}

function look(sample, at, element) {
  seen?.classList.remove("seen");
  element.classList.add("seen");
  seen = element;
  const reason = sample.reasons[at];
  const list = make("dl");
  for (const [name, label] of sample.mask[at] ? columns : []) {
    const className = name === state.column ? "now" : "";
    list.append(make("dt", { className, textContent: label }), make("dd", { className, textContent: number(sample.values[name]?.[at]) }));
  }
  document.getElementById("details").replaceChildren(
    make("h3", { textContent: shown(sample.text[at], sample.tokens[at]) }),
    make("p", { textContent: `token ${at + 1} of sample ${sample.id}, id ${sample.tokens[at]}` }),
    make("p", { textContent: reason && sample.mask[at] ? `not trained by the policy term: ${reason}` : reason ? `no loss: ${reason}` : "trained" }),
    list,
  );
}

function draw() {
  const focus = document.activeElement.id; // what is drawn anew loses it
  const aside = make("aside", { id: "details", label: "numbers of a token" });
  const two = make("div", { className: "two" }, make("main", { id: "samples" }), aside);
  document.getElementById("page").replaceChildren(drawControls(), drawLegend(), two);
  drawSamples();
  if (focus) document.getElementById(focus)?.focus();
}

// The address names what is shown, so that a link can lead to it.
function fromAddress() {
  const asked = new URLSearchParams(location.hash.slice(1));
  if (columns.some(([name]) => name === asked.get("column"))) state.column = asked.get("column");
  if (steps.includes(Number(asked.get("step") ?? NaN))) state.step = Number(asked.get("step"));
  if (samples.some((s) => s.step === state.step && String(s.id) === asked.get("sample"))) state.sample = asked.get("sample");
  for (const reason of asked.getAll("off")) state.off.add(reason);
}

if (samples.length && columns.length) {
  fromAddress();
  draw();
}
