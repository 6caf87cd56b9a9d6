// ---- drawing --------------------------------------------------------------------------------------------------------

const tone = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const narrow = () => window.innerWidth < 560;

function draw(place, traces, { title = {}, height = 380, more = {}, margin = {}, alt }) {
  const div = typeof place === "string" ? by(place) : place;
  const line = { gridcolor: tone("grid"), zerolinecolor: tone("line"), linecolor: tone("line"), automargin: true };
  const axisTitle = (text) => ({ text: harmless(text ?? ""), standoff: 8 });
  const layout = {
    height,
    autosize: true,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: narrow() ? 12 : 13, color: tone("ink") },
    margin: { l: 52, r: 12, t: 30, b: 48, ...margin },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: narrow() ? 11 : 13 } },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: tone("soft"), activecolor: tone("ink") },
    hoverlabel: { font: { family: getComputedStyle(document.body).fontFamily } },
    uirevision: JSON.stringify(title),
    ...more,
    xaxis: { ...line, title: axisTitle(title.x), ...(more.xaxis ?? {}) },
    yaxis: { ...line, title: axisTitle(title.y), ...(more.yaxis ?? {}) },
  };
  if (alt) div.setAttribute("aria-label", alt);
  underFigure(div, { x: title.x, y: title.y ?? more.yaxis?.title?.text });
  const drawn = Plotly.react(div, traces, layout, {
    responsive: true,
    displaylogo: false,
    displayModeBar: narrow() ? false : "hover",
    modeBarButtons: [["resetScale2d"]],
  });
  if (!div.dataset.explained) {
    div.dataset.explained = "yes";
    div.on("plotly_afterplot", () => explainAxes(div));
    explainAxes(div);
  }
  return drawn;
}

/* Titles of axes explain themselves under the mouse; the line below the figure does so for the keyboard. */
function explainAxes(div) {
  for (const node of div.querySelectorAll(".xtitle, .ytitle")) {
    const sentence = meaning(node.dataset.unformatted ?? node.textContent);
    if (!sentence) continue;
    node.dataset.term = sentence;
    node.style.pointerEvents = "all";
  }
}

/* Ticks of a logarithmic axis, three to nine of them: powers of ten; over less than three decades also 2 and 5 times
   them; over less than one decade, multiples of one step. */
function logarithmic(traces) {
  let [least, most] = [Infinity, 0];
  for (const trace of traces)
    for (const value of trace.y)
      if (value > 0 && Number.isFinite(value)) [least, most] = [Math.min(least, value), Math.max(most, value)];
  const axis = { type: "log", exponentformat: "power", dtick: 1 };
  if (!most) return axis;
  const decades = Math.log10(most) - Math.log10(least),
    drawn = 1.1 * decades; // with the margin around the lines
  // a constant figure: some room on both sides
  if (decades < 1e-6) return { ...axis, range: [Math.log10(most) - 0.7, Math.log10(most) + 0.7], dtick: "D2" };
  if (drawn >= 1) return { ...axis, dtick: drawn < 3 ? "D2" : Math.ceil(drawn / 8) };
  const [low, high] = [least / 10 ** (0.05 * decades), most * 10 ** (0.05 * decades)];
  const power = 10 ** Math.floor(Math.log10((high - low) / 8)),
    steps = [1, 2, 5, 10, 20].map((many) => Number((many * power).toPrecision(1)));
  // ticks are closest at the top
  const step =
    steps.find((one) => one >= (high - low) / 8 && Math.log10(high / (high - one)) >= 0.075 * drawn) ?? last(steps);
  return { ...axis, dtick: `L${step}` };
}

function lines(place, metric, { log, height }) {
  const traces = [];
  let several = false;
  content.curves.forEach((curve, i) => {
    const found = band(curve, state.axis, metric);
    if (!found) return;
    if (found.low) {
      several = true;
      const edge = {
        x: found.x,
        type: "scatter",
        mode: "lines",
        line: { width: 0 },
        hoverinfo: "skip",
        showlegend: false,
        legendgroup: `curve${i}`,
      };
      traces.push({ ...edge, y: found.low, meta: { curve: i, part: "low" } });
      traces.push({
        ...edge,
        y: found.high,
        fill: "tonexty",
        fillcolor: tinted(colour(i), 0.18),
        meta: { curve: i, part: "high" },
      });
    }
    traces.push({
      x: found.x,
      y: found.mean,
      type: "scatter",
      mode: found.x.length > 60 ? "lines" : "lines+markers",
      name: harmless(label(curve)),
      legendgroup: `curve${i}`,
      line: { color: colour(i), width: 2, dash: dash(i) },
      marker: { size: 4, color: colour(i) },
      meta: { curve: i, part: "mean" },
    });
  });
  draw(place, traces, {
    title: { x: AXES[state.axis], y: words(metric) },
    height: height ?? (narrow() ? 340 : 420),
    more: { yaxis: log ? logarithmic(traces) : { type: "linear" }, showlegend: content.curves.length > 1 },
    alt:
      `${words(metric)} against ${AXES[state.axis]}, one line for each of: ${content.curves.map(label).join("; ")}. ` +
      "The values are in the table of final figures.",
  });
  return several;
}

// ---- controls -------------------------------------------------------------------------------------------------------

function options(id, entries, chosen) {
  const select = by(id),
    text = JSON.stringify(entries);
  if (select.dataset.entries !== text) {
    select.replaceChildren(...entries.map(([value, shownAs]) => element("option", { value }, shownAs)));
    select.dataset.entries = text;
  }
  select.value = entries.some(([value]) => String(value) === String(chosen))
    ? String(chosen)
    : String(entries[0]?.[0] ?? "");
  return select.value;
}

function segments(id, entries, chosen, change) {
  const place = by(id),
    text = JSON.stringify(entries);
  if (place.dataset.entries !== text) {
    place.replaceChildren(
      ...entries.map(([value, shownAs]) => {
        const input = element("input", { type: "radio", name: id, value });
        input.addEventListener("change", () => change(value));
        return element("label", {}, input, shownAs);
      }),
    );
    place.dataset.entries = text;
  }
  for (const input of place.querySelectorAll("input")) input.checked = input.value === chosen;
}

const show = (id, yes) => {
  by(id).hidden = !yes;
  return yes;
};
