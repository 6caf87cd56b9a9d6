// ---- findings -------------------------------------------------------------------------------------------------------

const DRAWN = { histogram, images, ranking, matrix, by_client: byClient };

function finding(one, run, place) {
  const made = element(
    "article",
    { class: "finding" },
    element("h3", {}, String(one.title)),
    one.about ? element("p", { class: "note" }, String(one.about)) : null,
  );
  place.append(made);
  if (DRAWN[one.kind]) DRAWN[one.kind](one, made, run);
  // a kind that this version does not know
  else made.append(element("pre", {}, JSON.stringify(one, null, 1).slice(0, 4000)));
}

function plotIn(place) {
  const div = element("div", { class: "plot", role: "img" });
  place.append(div);
  return div;
}

function histogram(one, place) {
  const middles = one.edges.slice(1).map((edge, i) => (number(edge) + number(one.edges[i])) / 2),
    widths = one.edges.slice(1).map((edge, i) => number(edge) - number(one.edges[i]));
  const traces = one.groups.map((group, i) => ({
    type: "bar",
    x: middles,
    width: widths.map((width) => width * 0.96),
    y: group.counts.map(number),
    name: harmless(`${group.name} (${shown(group.counts.reduce((sum, n) => sum + n, 0))})`),
    marker: { color: tinted(colour(i), 0.62), line: { color: colour(i), width: 1 } },
    meta: { group: group.name },
  }));
  draw(plotIn(place), traces, {
    title: { x: words(one.x ?? ""), y: "samples" },
    height: 320,
    more: {
      barmode: "overlay",
      showlegend: traces.length > 1,
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
      xaxis: { range: [number(one.edges[0]), number(last(one.edges))] },
    },
    alt: `Distribution of ${one.x ?? "values"} for ${one.groups.map((group) => group.name).join(" and ")}.`,
  });
}

/* 8-bit grey or RGB pixels, one after the other, row by row. */
function picture(text, [height, width, channels = 1], alt) {
  const canvas = element("canvas", { width, height, role: "img", "aria-label": alt });
  const bytes = atob(text),
    image = new ImageData(width, height);
  for (let i = 0; i < width * height; i++) {
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = bytes.charCodeAt(channels === 3 ? 3 * i + c : i);
    image.data[4 * i + 3] = 255;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

function images(one, place) {
  place.append(
    element(
      "ul",
      { class: "pictures" },
      ...one.items.map((item) => {
        const facts = Object.entries(item.facts ?? {});
        const line = ([name, value]) => {
          if (typeof value === "boolean")
            return element("div", { class: value ? "wrong" : "right" }, value ? words(name) : `not ${words(name)}`);
          return element(
            "div",
            {},
            `${words(name)} `,
            typeof value === "number" ? put(element("span"), value) : String(value),
          );
        };
        return element(
          "li",
          {},
          picture(item.pixels, one.shape, facts.map(([name, value]) => `${words(name)} ${value}`).join(", ")),
          ...facts.map(line),
        );
      }),
    ),
  );
}

const anyCell = (value) => {
  if (typeof value === "number") return cell(value);
  if (typeof value === "boolean") return element("td", { class: value ? "wrong" : "" }, value ? "yes" : "no");
  return value === null || value === undefined ? cell(NaN) : element("td", {}, String(value));
};

function ranking(one, place) {
  const box = element(
    "div",
    { class: "box" },
    table(
      one.caption ?? one.title,
      ["rank", ...one.columns.map(words)],
      one.rows.map((row, i) => [element("th", { scope: "row" }, String(i + 1)), ...row.map(anyCell)]),
    ),
  );
  place.append(box);
}

/* A share for every pair of names; off the diagonal, a larger share has a darker ground. */
function matrix(one, place) {
  const off = one.values.flatMap((row, i) => row.filter((_, j) => i !== j)),
    most = Math.max(...off, Number.MIN_VALUE);
  const share = (value, i, j) => {
    const made = element("td", { class: i === j ? "same" : "share" }, `${(100 * value).toFixed(1)} %`);
    if (i !== j) made.style.setProperty("--share", `${Math.round((60 * value) / most)}%`);
    return made;
  };
  place.append(
    element(
      "div",
      { class: "box" },
      table(
        `Rows: ${one.rows}; columns: ${one.columns}`,
        ["", ...one.names],
        one.values.map((row, i) => [rowHead(one.names[i]), ...row.map((value, j) => share(number(value), i, j))]),
      ),
    ),
  );
}

function byClient(one, place, run) {
  const series = Object.entries(one.values),
    count = Math.max(...series.map(([, values]) => values.length)),
    at = Array.from({ length: count }, (_, i) => i);
  const names = at.map((i) => clientName(run, i));
  const traces = series.map(([name, values], i) => ({
    type: "bar",
    x: at,
    y: values.map(number),
    name: harmless(words(name)),
    marker: { color: colour(i) },
    customdata: names.map(harmless),
    hovertemplate: "client %{customdata}: %{y:.4f}<extra></extra>",
    meta: { series: name },
  }));
  draw(plotIn(place), traces, {
    title: { x: "client", y: series.length === 1 ? words(series[0][0]) : "" },
    height: 300,
    more: {
      showlegend: series.length > 1,
      bargap: 0.15,
      xaxis: count <= 30 ? { tickvals: at, ticktext: names.map(harmless) } : {},
    },
    alt: series
      .map(
        ([name, values]) =>
          `${words(name)} of ${values.length} clients, ` +
          `from ${Math.min(...values.map(number))} to ${Math.max(...values.map(number))}`,
      )
      .join("; "),
  });
  const sorted = series
    .map(([name, values]) => [
      name,
      values
        .map(number)
        .filter((value) => !Number.isNaN(value))
        .sort((a, b) => a - b),
    ])
    .filter(([, values]) => values.length);
  place.append(
    element(
      "div",
      { class: "box" },
      table(
        `Over ${count} clients`,
        ["", "lowest", "median", "mean", "highest"],
        sorted.map(([name, values]) => {
          const half = (values.length - 1) / 2;
          return [
            rowHead(words(name)),
            cell(values[0]),
            cell((values[Math.floor(half)] + values[Math.ceil(half)]) / 2),
            cell(spread(values).mean),
            cell(last(values)),
          ];
        }),
      ),
    ),
  );
}

let drawnFindings = "";
function findings() {
  const found = content.runs.map((run, i) => i).filter((i) => content.runs[i].findings?.length);
  if (!show("findings", found.length)) return;
  by(cleaning() ? "headline" : "studies").after(by("findings")); // suspects are what a cleaning is for
  const most = Math.max(...found.map((i) => content.runs[i].findings.length));
  state.run["findings-run"] ??= found.find((i) => content.runs[i].findings.length === most);
  const chosen = runPicker("findings-run", found),
    run = content.runs[chosen],
    key = JSON.stringify([tone("ground"), narrow(), chosen, run.findings]);
  if (key === drawnFindings) return;
  drawnFindings = key;
  const place = by("findings-list");
  place.replaceChildren();
  for (const one of run.findings) finding(one, run, place);
}
