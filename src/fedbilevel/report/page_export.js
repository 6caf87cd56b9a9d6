// ---- export ---------------------------------------------------------------------------------------------------------

const IMAGE_SCALE = 2; // pixels of a PNG for each pixel on the screen

function download(name, address) {
  const link = element("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
}

/* A file name of letters, digits and hyphens, whatever a record says. */
const fileName = (text, ending) => {
  const plain = String(text)
    .toLowerCase()
    .replace(/[^a-z0-9]+/g, "-")
    .replace(/^-+|-+$/g, "");
  return `${plain.slice(0, 60) || "report"}.${ending}`;
};

async function saveFigure(div, format) {
  const { width, height } = div.getBoundingClientRect();
  const layout = { ...div.layout, width, height, autosize: false, paper_bgcolor: tone("ground") };
  const options = { format, width, height, scale: format === "png" ? IMAGE_SCALE : 1 };
  const figure = { data: div.data, layout, config: { staticPlot: true } };
  download(fileName(div.dataset.name, format), await Plotly.toImage(figure, options));
}

/* One field of CSV. A spreadsheet would run text that begins as a formula does, so such text gets an apostrophe. */
function field(text) {
  const safe = /^[=+\-@\t\r]/.test(text) && Number.isNaN(Number(text)) ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

/* Exact values; a column with deviations is followed by a column for them. */
function csvOf(made) {
  const heads = [...made.tHead.rows[0].cells].map((one) => one.textContent);
  const rows = [...made.tBodies[0].rows].map((row) => [...row.cells]);
  const spreads = heads.map((_, i) => rows.some((row) => row[i]?.dataset.deviation !== undefined));
  const exact = (one) => one?.dataset.csv ?? one?.dataset.value ?? one?.textContent.replace("■\u00a0", "") ?? "";
  const line = (texts) => texts.map(field).join(",");
  const body = rows.map((row) =>
    line(heads.flatMap((_, i) => [exact(row[i]), ...(spreads[i] ? [row[i]?.dataset.deviation ?? ""] : [])])),
  );
  const head = heads.flatMap((name, i) => [name, ...(spreads[i] ? [`${name} (standard deviation)`] : [])]);
  return [line(head), ...body].join("\r\n") + "\r\n";
}

function saveTable(made) {
  const address = URL.createObjectURL(new Blob([csvOf(made)], { type: "text/csv;charset=utf-8" }));
  download(fileName(made.caption.textContent, "csv"), address);
  setTimeout(() => URL.revokeObjectURL(address), 60000);
}

function saveButton(format, what, save) {
  const button = element(
    "button",
    { type: "button", class: "save", "aria-label": `Save ${what} as ${format}` },
    format,
  );
  button.addEventListener("click", save);
  return button;
}

/* Below a figure: its axes, explained, and buttons that save it. */
function underFigure(div, title) {
  div.dataset.name = [title.y, title.x].filter(Boolean).join(" by ");
  let bar = div.nextElementSibling;
  if (!bar?.classList.contains("under")) {
    bar = element("div", { class: "under" });
    div.after(bar);
  }
  if (bar.dataset.key === JSON.stringify(title)) return; // a redrawn figure must not take the focus from a button
  bar.dataset.key = JSON.stringify(title);
  const axes = [
    ["vertical", title.y],
    ["horizontal", title.x],
  ].filter(([, text]) => text);
  const what = `the figure ${div.dataset.name}`;
  bar.replaceChildren(
    element("span", {}, ...axes.flatMap(([way, text], i) => [`${i ? ", " : "Axes: "}${way} `, explained(text)])),
    element(
      "span",
      {},
      ...["PNG", "SVG"].map((kind) => saveButton(kind, what, () => saveFigure(div, kind.toLowerCase()))),
    ),
  );
}
