// Elements, words, scales and the tooltip, which all pictures use. Times are in microseconds.

const data = JSON.parse(document.getElementById("data").textContent);
const find = (id) => document.getElementById(id);
const WORDS = {
  data: "data", buffers: "buffers", forward: "forward", loss: "loss", backward: "backward",
  late: "waits for late ranks", transfer: "transfer", update: "update", optimizer: "optimizer",
  sync: "parameter sync", call: "call", rest: "the rank's own work",
};
const MAX_ROWS = 16; // more ranks at once would not fit on a screen
const PRINT_WIDTH = 720; // so that text keeps its size on paper
let isPrinting = false;

// Elements and words

function add(parent, name, attributes = {}, text = null) {
  const isSvg = name === "svg" || parent.namespaceURI.endsWith("svg");
  const made = isSvg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text; // never innerHTML: names of parameters can hold anything
  parent.append(made);
  return made;
}

const line = (parent, css, x1, y1, x2, y2) => add(parent, "line", {class: css, x1, y1, x2, y2});
const rect = (parent, css, x, y, width, height) => add(parent, "rect", {class: css, x, y, width, height});
const write = (parent, css, x, y, words, anchor = "start") =>
  add(parent, "text", {class: css, x, y, "text-anchor": anchor}, words);

function time(us) {
  const [value, unit] = Math.abs(us) >= 1e7 ? [us / 1e6, "s"] : [us / 1e3, "ms"];
  const digits = Math.abs(value) < 10 ? 2 : Math.abs(value) < 1000 ? 1 : 0;
  return `${value.toLocaleString("en", {minimumFractionDigits: digits, maximumFractionDigits: digits})} ${unit}`;
}

function bytes(size) {
  for (const [unit, factor] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (size >= factor) return `${Number((size / factor).toPrecision(3))} ${unit}`;
  }
  return `${size} bytes`;
}

const byNumber = (a, b) => a - b;
const lowest = (values) => values.reduce((a, b) => Math.min(a, b)); // a long list is too long for Math.min(...)
const highest = (values) => values.reduce((a, b) => Math.max(a, b));
const short = (value) => Number(value.toPrecision(4)).toLocaleString("en", {maximumSignificantDigits: 4});
const inMs = (us) => `${short(us / 1000)} ms`;
const textWidth = (text) => text.length * 6.4; // wide enough for 11 px of any common font
const clamp = (value, low, high) => Math.max(low, Math.min(high, value));

function ticks(from, to, count) {
  const rough = (to - from) / Math.max(1, count) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = power * [1, 2, 5, 10].find((one) => one * power >= rough * 0.999);
  const found = [];
  for (let at = Math.ceil(from / size); at * size <= to * 1.000001; at++) found.push(at * size);
  return found;
}

// Clear a picture, and return its width in units of the picture. A unit grows with the text of the page, so that a
// wall screen can be read from afar.
function canvas(element, height, label) {
  const unit = parseFloat(getComputedStyle(document.documentElement).fontSize) / 16;
  const width = isPrinting ? PRINT_WIDTH : Math.max(260, (element.parentElement.clientWidth || 800) / unit);
  element.replaceChildren();
  element.setAttribute("viewBox", `0 0 ${width} ${height}`);
  if (label) element.setAttribute("aria-label", label);
  return width;
}

// Places in the window from places in a picture, and back
function frameOf(svg) {
  const box = svg.getBoundingClientRect(), unit = box.width / svg.viewBox.baseVal.width;
  return {
    outside: (x, y) => [box.left + x * unit, box.top + y * unit],
    inside: (event) => ({x: (event.clientX - box.left) / unit, y: (event.clientY - box.top) / unit}),
  };
}

function legend(id, entries) {
  find(id).replaceChildren();
  for (const [css, words, letter] of entries) {
    const item = add(find(id), "li");
    add(item, "span", {class: `swatch ${css}`, "aria-hidden": "true"}, letter ?? "");
    item.append(words);
  }
}

const tooltip = {
  show(x, y, [title, ...lines], isSaid = false) {
    const box = find("tooltip");
    box.replaceChildren();
    add(box, "b", {}, title);
    for (const words of lines) add(box, "div", {}, words);
    box.hidden = false;
    const {width, height} = box.getBoundingClientRect();
    box.style.left = `${clamp(x + 14, 4, Math.max(4, innerWidth - width - 4))}px`;
    box.style.top = `${y + 18 + height > innerHeight ? Math.max(4, y - height - 12) : y + 18}px`;
    if (isSaid) find("said").textContent = [title, ...lines].join(". ");
  },
  hide() { find("tooltip").hidden = true; },
};
