/* Draws the content that page_data.py wrote. Text of records becomes text nodes, never markup; plotly reads some markup
   in its texts, so theirs are escaped. Switches are in `state`; the page follows from `state` and the content, so newer
   content changes no switch. */
const LIVE = document.documentElement.dataset.live === "yes";
const CALLS = ["gy", "gx", "fx", "fy", "hvp", "jvp"];
const AXES = {
  iteration: "outer iterations",
  rounds: "communication rounds",
  megabytes: "megabytes",
  calls: "oracle calls",
  seconds: "seconds",
};
const SHORT = {
  iteration: "iterations",
  rounds: "rounds",
  megabytes: "megabytes",
  calls: "oracle calls",
  seconds: "seconds",
};
const COSTS = { rounds: "rounds", megabytes: "MB", gradients: "gradients", products: "products", seconds: "seconds" };
const UNITS = { bytes: "bytes", rounds: "rounds", calls: "oracle calls" };
// Okabe and Ito's colours, with grey for black and a darker yellow; later curves repeat them with other dashes
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8f98", "#a89a00"];
const DASHES = ["solid", "dash", "dot", "dashdot"];
const MOST_CARDS = 12;
const MOST_LABELLED = 400; // cells of a heat map that carry their number
const MOST_UNFOLDED = 4; // configurations that are printed
const MOST_TOLD = 4; // failures and silences that are reported in full
const MOST_COLUMNS = 8; // of a table with room around its numbers
const LONGEST = 30; // characters of a word that is never broken
const PAPER = 660; // pixels across a sheet
const EVERY = 2000; // milliseconds between requests while a run continues
const SILENT = 2; // minutes without news after which a live page says so

let onScreen = null; // how the page looked on the screen, while it is printed
let records = JSON.parse(document.getElementById("data").textContent); // everything
let content = records; // the part that is shown: the runs of one task
const state = {
  group: null,
  metric: null,
  axis: "rounds",
  log: false,
  target: null,
  typed: false,
  unit: "bytes",
  column: null,
  role: null,
  run: {},
};
const by = (id) => document.getElementById(id);

// ---- numbers and words ----------------------------------------------------------------------------------------------

const number = (value) => (value === null || value === undefined ? NaN : Number(value));
const words = (name) => String(name).replaceAll("_", " ");

const grouped = (digits) => digits.replace(/\B(?=(\d{3})+(?!\d))/g, "\u202f");

/* One rule for every number: integers in full, others with four digits; data-value and title hold the exact value. */
function shown(value) {
  if (Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value),
    sign = value < 0 ? "−" : "";
  if (Number.isInteger(value) && size < 1e15) return sign + grouped(String(size));
  if (size >= 1e7 || size < 1e-3) return sign + size.toExponential(2).replace("e+", "e").replace("e-", "e−");
  if (size >= 1000) return sign + grouped(size.toFixed(0));
  return sign + size.toPrecision(4);
}

/* A number that a person named: as short as it was written. */
const typed = (value) => (String(value).length < shown(value).length ? String(value).replace("-", "−") : shown(value));

/* Deviations with two digits: the third says nothing about the mean. */
const shownDeviation = (value) =>
  Number.isInteger(value) || !Number.isFinite(value) || value >= 100 || value < 1e-4
    ? shown(value >= 100 ? Math.round(value) : value)
    : value.toPrecision(2);

/* Mean and sample standard deviation; summed from the first value on, so that equal values have no deviation. */
const spread = (values) => {
  const mean = values[0] + values.reduce((sum, value) => sum + (value - values[0]), 0) / values.length;
  const squares = values.reduce((sum, value) => sum + (value - mean) ** 2, 0);
  return { mean, deviation: values.length > 1 ? Math.sqrt(squares / (values.length - 1)) : 0, count: values.length };
};

// plotly takes <b>, <a> and entities in texts for markup, and %{...} for a template
const harmless = (text) =>
  String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;").replaceAll("%{", "&#37;{");

function element(kind, attributes = {}, ...children) {
  const made = document.createElement(kind);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function put(node, value, { deviation = 0, count = 1 } = {}) {
  node.append(shown(value) + (count > 1 ? ` ±\u00a0${shownDeviation(deviation)}` : ""));
  node.dataset.value = String(value);
  if (count > 1) node.dataset.deviation = String(deviation);
  node.title = count > 1 ? `${value} ± ${deviation} over ${count} runs` : String(value);
  return node;
}

const cell = (value, more) => {
  const made = put(element("td"), value, more);
  if (Number.isNaN(value)) made.className = "none";
  return made;
};

const spreadCell = (values) => {
  const known = values.filter((value) => !Number.isNaN(value));
  if (!known.length) return cell(NaN);
  const found = spread(known);
  return cell(found.mean, found);
};

/* A table, and below it a button that saves it. */
function table(caption, heads, rows) {
  const made = element(
    "table",
    { class: heads.length > MOST_COLUMNS ? "many" : null },
    element("caption", {}, element("span", {}, caption)),
    element("thead", {}, element("tr", {}, ...heads.map((head) => element("th", { scope: "col" }, explained(head))))),
    element("tbody", {}, ...rows.map((cells) => element("tr", {}, ...cells))),
  );
  const both = document.createDocumentFragment();
  const save = saveButton("CSV", `the table ${caption}`, () => saveTable(made));
  both.append(made, element("div", { class: "under" }, save));
  return both;
}

/* Words stay whole, also on paper, but for those that are too long for any column, such as paths. */
function rowHead(text, colour) {
  const parts = String(text)
    .split(/(\s+)/)
    .map((word) => (word.trim() && word.length <= LONGEST ? element("span", { class: "word" }, word) : word));
  if (colour && parts[0].prepend) parts[0].prepend(swatch(colour));
  else if (colour) parts.unshift(swatch(colour));
  return element("th", { scope: "row" }, ...parts);
}
const swatch = (colour) => {
  const made = element("span", { class: "swatch", "aria-hidden": "true" }, "■\u00a0");
  made.style.color = colour;
  return made;
};
