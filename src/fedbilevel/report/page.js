"use strict";
/* Draws what content.py wrote. Words of records become text nodes, never markup; plotly reads a little markup in its texts, so theirs are escaped.
   Switches live in `state`; everything on the page follows from it and from the content, so newer content changes no switch. */
(() => {
  const LIVE = document.documentElement.dataset.live === "yes";
  const CALLS = ["gy", "gx", "fx", "fy", "hvp", "jvp"];
  const AXES = { iteration: "outer iterations", rounds: "communication rounds", megabytes: "megabytes", calls: "oracle calls", seconds: "seconds" };
  const SHORT = { iteration: "iterations", rounds: "rounds", megabytes: "megabytes", calls: "oracle calls", seconds: "seconds" };
  const COSTS = { rounds: "rounds", megabytes: "MB", gradients: "gradients", products: "products", seconds: "seconds" };
  const UNITS = { bytes: "bytes", rounds: "rounds", calls: "oracle calls" };
  // Okabe and Ito's colours, with grey for black and a darker yellow; later curves repeat them with other dashes
  const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8f98", "#a89a00"];
  const DASHES = ["solid", "dash", "dot", "dashdot"];
  const MOST_CARDS = 12;
  const MOST_LABELLED = 400; // cells of a heat map that carry their number
  const MOST_UNFOLDED = 4; // configurations that are printed
  const MOST_TOLD = 4; // failures and silences that are told in full
  const MOST_COLUMNS = 8; // of a table with room around its numbers
  const LONGEST = 30; // letters of a word that is never broken
  const PAPER = 660; // pixels across a sheet
  const EVERY = 2000; // milliseconds between questions while a run goes on
  const SILENT = 2; // minutes without anything new after which a live page says so

  let onScreen = null; // while the page is on paper: how it was on the screen
  let content = JSON.parse(document.getElementById("data").textContent);
  const state = { metric: null, axis: "rounds", log: false, target: null, typed: false, unit: "bytes", column: null, role: null, run: {} };
  const by = (id) => document.getElementById(id);

  // ---- numbers and words ---------------------------------------------------------------------------------------------------

  const number = (value) => (value === null || value === undefined ? NaN : Number(value));
  const words = (name) => String(name).replaceAll("_", " ");

  const grouped = (digits) => digits.replace(/\B(?=(\d{3})+(?!\d))/g, "\u202f");

  /* One rule for every number that is shown: whole ones in full, others with four digits; the exact value stands in data-value and title. */
  function shown(value) {
    if (Number.isNaN(value)) return "–";
    if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
    const size = Math.abs(value), sign = value < 0 ? "−" : "";
    if (Number.isInteger(value) && size < 1e15) return sign + grouped(String(size));
    if (size >= 1e7 || size < 1e-3) return sign + size.toExponential(2).replace("e+", "e").replace("e-", "e−");
    if (size >= 1000) return sign + grouped(size.toFixed(0));
    return sign + size.toPrecision(4);
  }

  /* A number that a person named: as short as it was written. */
  const typed = (value) => (String(value).length < shown(value).length ? String(value).replace("-", "−") : shown(value));

  /* Deviations with two digits: the third says nothing about the mean. */
  const shownDeviation = (value) => (Number.isInteger(value) || !Number.isFinite(value) || value >= 100 || value < 1e-4 ? shown(value >= 100 ? Math.round(value) : value) : value.toPrecision(2));

  /* Mean and sample standard deviation; summed from the first value on, so that equal values have no deviation. */
  const spread = (values) => {
    const mean = values[0] + values.reduce((sum, value) => sum + (value - values[0]), 0) / values.length;
    const squares = values.reduce((sum, value) => sum + (value - mean) ** 2, 0);
    return { mean, deviation: values.length > 1 ? Math.sqrt(squares / (values.length - 1)) : 0, count: values.length };
  };

  // plotly takes <b>, <a> and entities in texts for markup, and %{...} for a template
  const harmless = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;").replaceAll("%{", "&#37;{");

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
    node.append(shown(value) + (count > 1 ? ` ±\u00a0${shownDeviation(deviation)}` : "")); // it may go on in the next line
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

  function table(caption, heads, rows) {
    return element("table", { class: heads.length > MOST_COLUMNS ? "many" : null }, element("caption", {}, element("span", {}, caption)),
      element("thead", {}, element("tr", {}, ...heads.map((head) => element("th", { scope: "col" }, head)))),
      element("tbody", {}, ...rows.map((cells) => element("tr", {}, ...cells))));
  }

  /* Words stay whole, also on paper, but for those that are too long for any column, such as paths. */
  function rowHead(text, colour) {
    const parts = String(text).split(/(\s+)/).map((word) => (word.trim() && word.length <= LONGEST ? element("span", { class: "word" }, word) : word));
    if (colour && parts[0].prepend) parts[0].prepend(swatch(colour));
    else if (colour) parts.unshift(swatch(colour));
    return element("th", { scope: "row" }, ...parts);
  }
  const swatch = (colour) => { const made = element("span", { class: "swatch", "aria-hidden": "true" }, "■\u00a0"); made.style.color = colour; return made; };

  // ---- runs and curves -----------------------------------------------------------------------------------------------------

  const column = (run, name) => {
    if (name === "calls") return sums(run, CALLS);
    if (name === "gradients") return sums(run, CALLS.slice(0, 4));
    if (name === "products") return sums(run, CALLS.slice(4));
    return (run.columns[name] ?? []).map(number);
  };
  const sums = (run, names) => names.map((name) => column(run, name)).reduce((total, values) => total.map((value, i) => value + (values[i] ?? NaN)), run.columns.iteration?.map(() => 0) ?? []);
  const last = (values) => (values.length ? values[values.length - 1] : NaN);
  const runsOf = (curve) => curve.runs.map((number) => content.runs[number]);
  /* Those that count in means: a run that diverged has costs but no figures. */
  const whole = (curve) => runsOf(curve).filter((run) => run.state !== "diverged" && (run.columns.iteration ?? []).length);
  const colour = (i) => COLOURS[i % COLOURS.length];
  const dash = (i) => DASHES[Math.floor(i / COLOURS.length) % DASHES.length];
  const tinted = (hex, alpha) => `rgba(${[1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)).join(",")},${alpha})`;
  const label = (curve) => {
    const lost = ["diverged", "failed"].map((state) => [state, runsOf(curve).filter((run) => run.state === state).length]).filter(([, many]) => many);
    return curve.name + (lost.length ? ` (${lost.map(([state, many]) => `${many} of ${curve.runs.length} ${state}`).join(", ")})` : "");
  };
  const planned = (run) => (run.planned.iteration ? ` of ${run.planned.iteration}` : "");
  /* How a run came to an end that nobody wanted. */
  const failure = (run, who = "") => {
    const how = run.state === "diverged" ? "diverged" : `failed after outer iteration ${run.end?.iteration ?? 0}${planned(run)}`;
    return (who ? `${who} ${how}` : how[0].toUpperCase() + how.slice(1)) + (run.end?.why ? `: ${run.end.why}` : ".");
  };
  const isLost = (run) => run.state === "failed" || run.state === "diverged";

  function between(line, at) {
    if (at >= last(line.x)) return last(line.y); // of several values at one place, the last
    const next = line.x.findIndex((x) => x > at);
    const [x0, x1, y0, y1] = [line.x[next - 1], line.x[next], line.y[next - 1], line.y[next]];
    return y0 + ((y1 - y0) * (at - x0)) / (x1 - x0);
  }

  /* The mean over runs that differ in their seeds, with the lowest and the highest, as far as all of them go. */
  function band(curve, axis, metric) {
    const lines = whole(curve).map((run) => {
      const x = column(run, axis), y = column(run, metric);
      const kept = x.map((_, i) => i).filter((i) => !Number.isNaN(x[i]) && !Number.isNaN(number(y[i]))); // a run may lack the metric
      return { x: kept.map((i) => x[i]), y: kept.map((i) => y[i]) };
    }).filter((line) => line.x.length);
    if (!lines.length) return null;
    if (lines.length === 1) return { x: lines[0].x, mean: lines[0].y, low: null, high: null, count: 1 };
    const alike = lines.every((line) => line.x.length === lines[0].x.length && line.x.every((x, i) => x === lines[0].x[i]));
    let x = lines[0].x, values = lines.map((line) => line.y);
    if (!alike) {
      const from = Math.max(...lines.map((line) => line.x[0])), to = Math.min(...lines.map((line) => last(line.x)));
      x = [...new Set(lines.flatMap((line) => line.x))].filter((at) => at >= from && at <= to).sort((a, b) => a - b);
      values = lines.map((line) => x.map((at) => between(line, at)));
    }
    const each = (pick) => x.map((_, i) => pick(values.map((line) => line[i])));
    return { x, mean: each((some) => spread(some).mean), low: each((some) => Math.min(...some)), high: each((some) => Math.max(...some)), count: lines.length };
  }

  // ---- drawing -------------------------------------------------------------------------------------------------------------

  const tone = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const narrow = () => window.innerWidth < 560;

  function draw(place, traces, { title = {}, height = 380, more = {}, margin = {}, alt }) {
    const div = typeof place === "string" ? by(place) : place;
    const line = { gridcolor: tone("grid"), zerolinecolor: tone("line"), linecolor: tone("line"), automargin: true };
    const axisTitle = (text) => ({ text: harmless(text ?? ""), standoff: 8 });
    const layout = {
      height, autosize: true, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
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
    return Plotly.react(div, traces, layout, { responsive: true, displaylogo: false, displayModeBar: narrow() ? false : "hover", modeBarButtons: [["toImage", "resetScale2d"]] });
  }

  /* Ticks of a logarithmic axis, three to nine of them: powers of ten, in steps that are as wide as they must be; over less than three decades also 2 and 5
     times them; over less than one, multiples of one step. */
  function logarithmic(traces) {
    let [least, most] = [Infinity, 0];
    for (const trace of traces) for (const value of trace.y) if (value > 0 && Number.isFinite(value)) [least, most] = [Math.min(least, value), Math.max(most, value)];
    const axis = { type: "log", exponentformat: "power", dtick: 1 };
    if (!most) return axis;
    const decades = Math.log10(most) - Math.log10(least), drawn = 1.1 * decades; // with the room that is left around the lines
    if (decades < 1e-6) return { ...axis, range: [Math.log10(most) - 0.7, Math.log10(most) + 0.7], dtick: "D2" }; // nothing moves
    if (drawn >= 1) return { ...axis, dtick: drawn < 3 ? "D2" : Math.ceil(drawn / 8) };
    const [low, high] = [least / 10 ** (0.05 * decades), most * 10 ** (0.05 * decades)];
    const power = 10 ** Math.floor(Math.log10((high - low) / 8)), steps = [1, 2, 5, 10, 20].map((many) => Number((many * power).toPrecision(1)));
    const step = steps.find((one) => one >= (high - low) / 8 && Math.log10(high / (high - one)) >= 0.075 * drawn) ?? last(steps); // they are closest at the top
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
        const edge = { x: found.x, type: "scatter", mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false, legendgroup: `curve${i}` };
        traces.push({ ...edge, y: found.low, meta: { curve: i, part: "low" } });
        traces.push({ ...edge, y: found.high, fill: "tonexty", fillcolor: tinted(colour(i), 0.18), meta: { curve: i, part: "high" } });
      }
      traces.push({
        x: found.x, y: found.mean, type: "scatter", mode: found.x.length > 60 ? "lines" : "lines+markers", name: harmless(label(curve)), legendgroup: `curve${i}`,
        line: { color: colour(i), width: 2, dash: dash(i) }, marker: { size: 4, color: colour(i) }, meta: { curve: i, part: "mean" },
      });
    });
    draw(place, traces, {
      title: { x: AXES[state.axis], y: words(metric) }, height: height ?? (narrow() ? 340 : 420),
      more: { yaxis: log ? logarithmic(traces) : { type: "linear" }, showlegend: content.curves.length > 1 },
      alt: `${words(metric)} against ${AXES[state.axis]}, one line for each of: ${content.curves.map(label).join("; ")}. The values are in the table of final figures.`,
    });
    return several;
  }

  // ---- controls ------------------------------------------------------------------------------------------------------------

  function options(id, entries, chosen) {
    const select = by(id), text = JSON.stringify(entries);
    if (select.dataset.entries !== text) {
      select.replaceChildren(...entries.map(([value, shownAs]) => element("option", { value }, shownAs)));
      select.dataset.entries = text;
    }
    select.value = entries.some(([value]) => String(value) === String(chosen)) ? String(chosen) : String(entries[0]?.[0] ?? "");
    return select.value;
  }

  function segments(id, entries, chosen, change) {
    const place = by(id), text = JSON.stringify(entries);
    if (place.dataset.entries !== text) {
      place.replaceChildren(...entries.map(([value, shownAs]) => {
        const input = element("input", { type: "radio", name: id, value });
        input.addEventListener("change", () => change(value));
        return element("label", {}, input, shownAs);
      }));
      place.dataset.entries = text;
    }
    for (const input of place.querySelectorAll("input")) input.checked = input.value === chosen;
  }

  const show = (id, yes) => { by(id).hidden = !yes; return yes; };

  // ---- sections ------------------------------------------------------------------------------------------------------------

  function heading() {
    document.title = content.title;
    by("title").textContent = content.title;
    const count = (many, one, several = `${one}s`) => `${many} ${many === 1 ? one : several}`;
    const said = [];
    if (content.runs.length) {
      const clients = [...new Set(content.runs.map((run) => run.num_clients).filter((n) => n))];
      const names = [...new Set(content.curves.map((curve) => curve.algorithm))];
      said.push(names.length <= 6 ? names.join(", ") : count(names.length, "algorithm"));
      if (clients.length) said.push(`${clients.join(" or ")} ${content.runs.every((run) => run.engine === "peers") ? "peers" : clients.length === 1 && clients[0] === 1 ? "client" : "clients"}`);
      said.push(count(content.runs.length, "run"));
      if (content.curves.some((curve) => curve.runs.length > 1)) said.push(`${[...new Set(content.curves.map((curve) => curve.runs.length))].join(" or ")} seeds each`);
    }
    for (const study of content.studies) {
      if (study.kind === "influence") said.push(`${study.method} on ${study.task.data ?? "data"}, ${count(study.num_instances, "instance")}, ${count(study.removed.length, "removal")} tried`);
      else said.push(`${count(new Set(study.outcomes.map((one) => one.method)).size, "method")} on ${count(new Set(study.outcomes.map((one) => one.network)).size, "network")}`);
    }
    by("what").textContent = said.join(" · ");
    by("made").textContent = `${LIVE ? "Served" : "Written"} by fedbilevel ${content.made.fedbilevel}, ${content.made.time.replace("T", " ").replace("+00:00", " UTC")}. Numbers are shown with four digits; point at one for its exact value.`;
  }

  function cards() {
    if (!show("headline", content.runs.length && content.metrics.length)) return;
    by("cards").replaceChildren(...content.curves.slice(0, MOST_CARDS).map((curve, i) => {
      const runs = whole(curve);
      const of = (name) => runs.map((run) => last(column(run, name))).filter((value) => !Number.isNaN(value));
      const figure = of(state.metric);
      const big = element("p", { class: "big" });
      if (figure.length) {
        const found = spread(figure);
        big.append(shown(found.mean));
        if (found.count > 1) big.append(element("small", {}, ` ± ${shownDeviation(found.deviation)}`));
        big.dataset.value = String(found.mean);
        big.title = found.count > 1 ? `${found.mean} ± ${found.deviation} over ${found.count} runs` : String(found.mean);
      } else big.append("–");
      const others = content.metrics.filter((name) => name !== state.metric && !name.includes("loss")).slice(0, 2);
      const entries = [...others.map((name) => [words(name), name]), ["rounds", "rounds"], ["megabytes", "megabytes"], ["oracle calls", "calls"], ["seconds", "seconds"]];
      const made = element("article", { class: "card" }, element("h3", {}, label(curve)), big,
        element("p", { class: "of" }, `${runs.length && runs.every((run) => run.state === "finished") ? "final" : "last"} ${words(state.metric)}${figure.length > 1 ? `, mean of ${figure.length} seeds` : ""}`),
        ...[...new Set(runsOf(curve).filter(isLost).map((run) => failure(run)))].map((text) => element("p", { class: "why" }, text)),
        element("dl", {}, ...entries.flatMap(([text, name]) => {
          const values = of(name);
          return values.length ? [element("dt", {}, text), put(element("dd"), spread(values).mean)] : [];
        })));
      made.style.setProperty("--mark", colour(i));
      return made;
    }));
  }

  const axes = () => Object.keys(AXES).filter((name) => content.runs.some((run) => column(run, name).some((value) => !Number.isNaN(value))));

  function curves() {
    if (!show("curves", content.metrics.length && content.runs.some((run) => (run.columns.iteration ?? []).length))) return;
    state.metric = options("metric", content.metrics.map((name) => [name, words(name)]), state.metric ?? content.target?.metric);
    const known = axes();
    if (!known.includes(state.axis)) state.axis = known[0];
    segments("axis", known.map((name) => [name, SHORT[name]]), state.axis, (value) => { state.axis = value; render(curves, diagnostics); });
    by("log").checked = state.log;
    const several = lines("curves-plot", state.metric, { log: state.log });
    by("curves-note").textContent = several ? "Lines are means over runs that differ in nothing but their seeds; bands reach from the lowest to the highest." : "";
    by("curves-note").hidden = !several;
  }

  const falls = (metric) => content.falls.includes(metric);
  /* The side from which a run comes to a value, as compare.Target: figures that fall from above, others from where the first finite measurement lies. */
  const rises = (values, metric, value) => !falls(metric) && values.find(Number.isFinite) < value;

  /* The first finite measurement at or beyond the value; -1 where there is none. */
  function reached(values, metric, value) {
    const up = rises(values, metric, value);
    return values.findIndex((one) => Number.isFinite(one) && (up ? one >= value : one <= value));
  }

  /* Where nobody named a target: of the values at which runs end, also rounded to four digits, the hardest of those that most runs reach. */
  function easiest(metric) {
    const runs = content.curves.flatMap(whole).map((run) => column(run, metric).filter(Number.isFinite)), ways = runs.filter((values) => values.length);
    const up = !falls(metric) && ways.filter((values) => last(values) > values[0]).length * 2 >= ways.length;
    const rounded = (value, way) => {
      const unit = 10 ** (Math.floor(Math.log10(Math.abs(value))) - 3);
      return value === 0 ? 0 : Number((way(value / unit) * unit).toPrecision(4));
    };
    let best = { value: null, many: 0, all: runs.length };
    for (const round of [(value) => rounded(value, up ? Math.floor : Math.ceil), (value) => value]) {
      for (const value of new Set(ways.map((values) => round(last(values))).sort((a, b) => (up ? b - a : a - b)))) {
        const many = runs.filter((values) => reached(values, metric, value) >= 0).length;
        if (many > best.many) best = { ...best, value, many };
      }
    }
    return best;
  }

  function side(metric, value) {
    if (falls(metric)) return "at or below";
    const sides = new Set(content.curves.flatMap(whole).map((run) => column(run, metric)).filter((values) => values.some(Number.isFinite)).map((values) => rises(values, metric, value)));
    return sides.size !== 1 ? "at or beyond" : sides.has(true) ? "at or above" : "at or below";
  }

  function targets() {
    const names = [...content.metrics, ...content.diagnostics];
    if (!show("target", names.length && content.curves.some((curve) => whole(curve).length))) return;
    if (!state.target) state.target = content.target ? { ...content.target, value: number(content.target.value) } : { metric: state.metric, value: null };
    if (!names.includes(state.target.metric)) state.target.metric = names[0];
    options("target-metric", names.map((name) => [name, words(name)]), state.target.metric);
    const given = state.typed || (content.target && content.target.metric === state.target.metric);
    const usual = given ? null : easiest(state.target.metric);
    if (usual) state.target.value = usual.value;
    const input = by("target-value"), { metric, value } = state.target;
    if (document.activeElement !== input) input.value = value === null || Number.isNaN(value) ? "" : String(value);
    const every = content.runs.some((run) => run.state === "diverged") ? "every run that did not diverge" : "every run";
    const about = () => (usual.many === usual.all ? `this is one that ${every} reaches` : `this is one that ${usual.many} of ${usual.all} runs reach: none is reached by ${every}`);
    by("target-note").textContent = usual?.many ? `Nobody named a value, so ${about()}; type another one.` : "";
    by("target-note").hidden = !usual?.many;
    if (value === null || Number.isNaN(value)) {
      by("target-table").replaceChildren(element("p", { class: "note" }, "Type the value to reach."));
      return;
    }
    const rows = content.curves.map((curve, i) => {
      const all = runsOf(curve);
      const there = whole(curve).map((run) => [run, reached(column(run, metric), metric, value)]).filter(([, at]) => at >= 0);
      const head = [rowHead(label(curve), colour(i)), put(element("td"), there.length)];
      head[1].textContent = `${there.length} of ${all.length}`;
      if (!there.length) return [...head, element("td", { colspan: Object.keys(COSTS).length, class: "none" }, "not reached")];
      return [...head, ...Object.keys(COSTS).map((cost) => spreadCell(there.map(([run, at]) => column(run, cost)[at])))];
    });
    by("target-table").replaceChildren(table(`Paid, summed over clients, at the first measurement where ${words(metric)} is ${side(metric, value)} ${typed(value)}${content.curves.some((curve) => curve.runs.length > 1) ? "; mean ± standard deviation over the runs that got there" : ""}`,
      ["curve", "reached", ...Object.values(COSTS)], rows));
  }

  function finals() {
    const names = [...content.metrics, ...content.diagnostics];
    if (!show("finals", content.curves.some((curve) => whole(curve).length))) return;
    const costs = { ...COSTS, calls: "oracle calls" }, several = content.curves.some((curve) => curve.runs.length > 1) ? ", mean ± standard deviation over runs" : "";
    const rows = (some) => content.curves.map((curve, i) => [rowHead(label(curve), colour(i)), cell(whole(curve).length), ...some.map((name) => spreadCell(whole(curve).map((run) => last(column(run, name)))))]);
    const parts = onScreen ? names.map((_, i) => names.slice(i, i + MOST_COLUMNS)).filter((_, i) => i % MOST_COLUMNS === 0) : [names]; // paper does not scroll
    if (names.length) by("finals-table").replaceChildren(...parts.map((some) => table(`At the last measurement${several}`, ["curve", "runs", ...some.map(words)], rows(some))));
    show("finals-table", names.length);
    by("costs-table").replaceChildren(table(`Paid until then, summed over clients${several}`, ["curve", "runs", ...Object.values(costs)], rows(Object.keys(costs))));
  }

  const MEANING = {
    hypergradient: "Hypergradient: the length of the gradient of the upper objective at x, for which y is first solved to y*(x) and the linear system of the hypergradient solved too, both over all data: zero where x is stationary. Empty where they have no single solution (a lower level that is not strongly convex) or were not solved in reasonable time.",
    residual: "Residual: |mean(H u − f_y)| / |mean f_y|: how far u, with which the hypergradient is made, is from solving its linear system (for a lower level of every client's own: root mean squares over clients).",
    lower_gradient: "Lower gradient: |mean g_y|: how far y is from y*(x), where it is zero.",
  };

  function diagnostics() {
    if (!show("diagnostics", content.diagnostics.length)) return;
    by("diagnostics-note").textContent = content.diagnostics.map((name) => MEANING[name]).join(" ");
    const place = by("diagnostics-plots");
    for (const name of content.diagnostics) {
      if (!by(`diagnostics-${name}`)) place.append(element("div", {}, element("h3", {}, words(name)), element("div", { class: "plot", role: "img", id: `diagnostics-${name}` })));
    }
    for (const name of content.diagnostics) lines(`diagnostics-${name}`, name, { log: true, height: narrow() ? 300 : 340 }); // now that each has its width
  }

  // ---- who holds what --------------------------------------------------------------------------------------------------------

  const clientName = (run, i) => run?.client_names?.[i] ?? String(i);
  const runName = (number) => {
    const run = content.runs[number], curve = content.curves.find((one) => one.runs.includes(number));
    const seeds = curve.runs.length > 1 ? `, seed ${[run.seed, run.data_seed].filter((seed) => seed !== null && seed !== undefined).join("/")}` : "";
    return curve.name + seeds;
  };

  function runPicker(id, numbers) {
    const entries = numbers.map((number) => [number, runName(number)]);
    const twice = entries.map(([number, name]) => [number, entries.filter((other) => other[1] === name).length > 1 ? `${name} [${content.runs[number].path}]` : name]);
    const chosen = Number(options(id, twice, state.run[id]));
    by(`${id}-label`).hidden = numbers.length < 2;
    state.run[id] = chosen;
    return chosen;
  }

  const scale = () => (tone("ground") === "#ffffff" ? [[0, "#f3f7fb"], [0.001, "#d8e8f5"], [0.5, "#4f9ccf"], [1, "#00406b"]] : [[0, "#191e24"], [0.001, "#1d3346"], [0.5, "#2f7fb3"], [1, "#bfe3ff"]]);

  function partition() {
    if (!show("partition", content.partitions.length)) return;
    const firsts = content.partitions.map((one) => one.runs[0]);
    const chosen = runPicker("partition-run", firsts);
    const { clients } = content.partitions[firsts.indexOf(chosen)];
    const role = state.role = options("partition-role", Object.keys(clients.sizes).map((name) => [name, words(name)]), state.role);
    const sizes = clients.sizes[role], labels = clients.labels?.[role];
    const names = sizes.map((_, i) => clientName(content.runs[chosen], i)), x = sizes.map((_, i) => i);
    const bars = { type: "bar", x, y: sizes, marker: { color: COLOURS[0] }, customdata: names.map(harmless), hovertemplate: "client %{customdata}: %{y} samples<extra></extra>", showlegend: false, meta: { part: "sizes" } };
    const ticks = names.length <= 30 ? { tickvals: x, ticktext: names.map(harmless) } : {};
    const traces = [bars];
    const more = { bargap: 0.15, xaxis: { ...ticks, range: [-0.5, x.length - 0.5] }, yaxis: { title: { text: "samples" } } };
    let height = 260;
    if (labels) {
      const cells = labels.counts.length * sizes.length;
      const most = Math.max(1, ...labels.counts.flat());
      traces.push({
        type: "heatmap", x, y: labels.values.map((_, i) => i), z: labels.counts, yaxis: "y2", colorscale: scale(), zmin: 0, zmax: most, showscale: !narrow(), colorbar: { title: { text: "samples" }, thickness: 12, len: 0.72, y: 0.36, outlinewidth: 0 },
        xgap: 1, ygap: 1, text: labels.counts.map((row) => row.map((count) => (count ? String(count) : ""))), texttemplate: cells <= MOST_LABELLED && !narrow() ? "%{text}" : undefined, textfont: { size: 11 },
        customdata: labels.counts.map((row, i) => row.map((_, j) => [harmless(names[j]), harmless(labels.values[i])])), hovertemplate: "client %{customdata[0]}, label %{customdata[1]}: %{z} samples<extra></extra>", meta: { part: "counts" },
      });
      height = Math.min(760, 220 + 24 * labels.values.length);
      const step = Math.ceil(labels.values.length / 30), places = labels.values.map((_, i) => i).filter((i) => i % step === 0);
      more.yaxis = { title: { text: "samples" }, domain: [0.8, 1], nticks: 4 };
      more.yaxis2 = { title: { text: "label" }, domain: [0, 0.74], automargin: true, autorange: "reversed", tickvals: places, ticktext: places.map((i) => harmless(labels.values[i])), gridcolor: "rgba(0,0,0,0)", linecolor: tone("line"), zeroline: false };
      more.xaxis = { ...more.xaxis, anchor: "y2", showgrid: false, zeroline: false };
    }
    draw("partition-plot", traces, { title: { x: "client", y: "samples" }, height, more,
      alt: `How many ${words(role)} samples each of ${sizes.length} clients holds${labels ? ", by label" : ""}. Least ${Math.min(...sizes)}, most ${Math.max(...sizes)}.` });
    const total = sizes.reduce((sum, size) => sum + size, 0);
    by("partition-note").textContent = `${shown(total)} ${words(role)} samples at ${sizes.length} clients, from ${shown(Math.min(...sizes))} to ${shown(Math.max(...sizes))} each.`;
  }

  // ---- costs -----------------------------------------------------------------------------------------------------------------

  const phaseCosts = {
    rounds: (phase) => number(phase.rounds ?? 0),
    bytes_up: (phase) => number(phase.bytes_up ?? 0),
    bytes_down: (phase) => number(phase.bytes_down ?? 0),
    gradients: (phase) => CALLS.slice(0, 4).reduce((sum, name) => sum + number(phase[name] ?? 0), 0),
    products: (phase) => CALLS.slice(4).reduce((sum, name) => sum + number(phase[name] ?? 0), 0),
    samples: (phase) => number(phase.samples ?? 0),
    bytes: (phase) => phaseCosts.bytes_up(phase) + phaseCosts.bytes_down(phase),
    calls: (phase) => phaseCosts.gradients(phase) + phaseCosts.products(phase),
  };

  function ledger() {
    const charged = content.runs.map((run, i) => i).filter((i) => content.runs[i].ledger);
    if (!show("ledger", charged.length)) return;
    const parts = content.curves.map((curve, i) => ({ curve, i, runs: runsOf(curve).filter((run) => run.ledger?.phases && Object.keys(run.ledger.phases).length) })).filter((one) => one.runs.length);
    const phases = [...new Set(parts.flatMap((one) => one.runs.flatMap((run) => Object.keys(run.ledger.phases))))];
    by("ledger-plot").hidden = by("ledger-table").hidden = !phases.length;
    by("ledger-unit").closest(".controls").hidden = !phases.length;
    if (phases.length) {
      segments("ledger-unit", Object.entries(UNITS), state.unit, (value) => { state.unit = value; render(ledger); });
      const values = (one, phase, cost) => one.runs.map((run) => (run.ledger.phases[phase] ? phaseCosts[cost](run.ledger.phases[phase]) : 0));
      const traces = phases.map((phase, k) => ({
        type: "bar", orientation: "h", name: harmless(words(phase)), y: parts.map((_, i) => i), x: parts.map((one) => spread(values(one, phase, state.unit)).mean),
        marker: { color: colour(k), pattern: { shape: ["", "/", ".", "x"][Math.floor(k / COLOURS.length) % 4] } }, hovertemplate: "%{x}<extra>%{fullData.name}</extra>", meta: { phase },
      }));
      const text = parts.map((one) => harmless(one.curve.name.length > (narrow() ? 16 : 42) ? one.curve.name.slice(0, narrow() ? 15 : 41) + "…" : one.curve.name));
      draw("ledger-plot", traces, { title: { x: UNITS[state.unit] }, height: 130 + 44 * parts.length + 20 * Math.ceil(phases.length / (narrow() ? 2 : 5)), margin: { l: 12 },
        more: { barmode: "stack", yaxis: { tickvals: parts.map((_, i) => i), ticktext: text, autorange: "reversed", showgrid: false }, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, traceorder: "normal" }, showlegend: true },
        alt: `${UNITS[state.unit]} of every phase, as stacked bars, one for each curve. The values are in the table below.` });
      const names = { rounds: "rounds", bytes_up: "bytes up", bytes_down: "bytes down", gradients: "gradients", products: "products", calls: "oracle calls", samples: "samples" };
      const rows = parts.flatMap((one) => {
        const own = phases.filter((phase) => one.runs.some((run) => run.ledger.phases[phase]));
        const line = (phase) => [rowHead(one.curve.name, colour(one.i)), element("td", { class: "left" }, words(phase)), ...Object.keys(names).map((cost) => spreadCell(values(one, phase, cost)))];
        const total = [rowHead(one.curve.name, colour(one.i)), element("td", { class: "left" }, element("strong", {}, "all phases")),
          ...Object.keys(names).map((cost) => spreadCell(one.runs.map((run) => Object.values(run.ledger.phases).reduce((sum, phase) => sum + phaseCosts[cost](phase), 0))))];
        return [...own.map(line), total];
      });
      by("ledger-table").replaceChildren(table(`Costs of every phase, summed over clients${parts.some((one) => one.runs.length > 1) ? "; mean ± standard deviation over runs" : ""}`, ["curve", "phase", ...Object.values(names)], rows));
      by("ledger-table").querySelectorAll("thead th")[1].className = "left";
    }
    const single = charged.filter((i) => Object.keys(content.runs[i].ledger.clients ?? {}).length || Object.keys(content.runs[i].ledger.edges ?? {}).length);
    if (!show("ledger-clients", single.some((i) => Object.keys(content.runs[i].ledger.clients ?? {}).length)) && !single.length) { show("ledger-edges", false); return; }
    const chosen = runPicker("ledger-run", single), run = content.runs[chosen], bill = run.ledger;
    const columns = Object.keys(bill.clients ?? {});
    if (columns.length) {
      state.column = options("ledger-column", columns.map((name) => [name, words(name)]), state.column ?? (columns.includes("bytes_up") ? "bytes_up" : columns[0]));
      const amounts = bill.clients[state.column].map(number), x = amounts.map((_, i) => i), names = amounts.map((_, i) => clientName(run, i));
      draw("ledger-clients-plot", [{ type: "bar", x, y: amounts, marker: { color: COLOURS[0] }, customdata: names.map(harmless), hovertemplate: "client %{customdata}: %{y}<extra></extra>", meta: { column: state.column } }],
        { title: { x: "client", y: words(state.column) }, height: 270, more: { bargap: 0.15, xaxis: names.length <= 30 ? { tickvals: x, ticktext: names.map(harmless) } : {} },
          alt: `${words(state.column)} of each of ${amounts.length} clients, from ${Math.min(...amounts)} to ${Math.max(...amounts)}.` });
    }
    const edges = bill.edges?.bytes;
    if (!show("ledger-edges", edges)) return;
    const names = edges.map((_, i) => clientName(run, i)), at = edges.map((_, i) => i), ticks = names.length <= 30 ? { tickvals: at, ticktext: names.map(harmless) } : {};
    draw("ledger-edges-plot", [{ type: "heatmap", x: at, y: at, z: edges.map((row) => row.map(number)), colorscale: scale(), zmin: 0, xgap: 1, ygap: 1, colorbar: { title: { text: "bytes" }, thickness: 12, outlinewidth: 0 },
      customdata: edges.map((row, i) => row.map((_, j) => [harmless(names[i]), harmless(names[j])])), hovertemplate: "%{customdata[0]} to %{customdata[1]}: %{z} bytes<extra></extra>" }],
      { title: { x: "receiver", y: "sender" }, height: Math.min(620, 180 + 22 * edges.length), more: { xaxis: { ...ticks, showgrid: false, zeroline: false }, yaxis: { ...ticks, autorange: "reversed", showgrid: false, zeroline: false } },
        alt: `Bytes that each of ${edges.length} peers sent to each other.` });
  }

  // ---- findings and studies ----------------------------------------------------------------------------------------------------

  const DRAWN = { histogram, images, ranking, by_client: byClient };

  function finding(one, run, place) {
    const made = element("article", { class: "finding" }, element("h3", {}, String(one.title)), one.about ? element("p", { class: "note" }, String(one.about)) : null);
    place.append(made);
    if (DRAWN[one.kind]) DRAWN[one.kind](one, made, run);
    else made.append(element("pre", {}, JSON.stringify(one, null, 1).slice(0, 4000))); // of a task of somebody else's
  }

  function plotIn(place) {
    const div = element("div", { class: "plot", role: "img" });
    place.append(div);
    return div;
  }

  function histogram(one, place) {
    const middles = one.edges.slice(1).map((edge, i) => (number(edge) + number(one.edges[i])) / 2), widths = one.edges.slice(1).map((edge, i) => number(edge) - number(one.edges[i]));
    const traces = one.groups.map((group, i) => ({ type: "bar", x: middles, width: widths.map((width) => width * 0.96), y: group.counts.map(number), name: harmless(`${group.name} (${shown(group.counts.reduce((sum, n) => sum + n, 0))})`),
      marker: { color: tinted(colour(i), 0.62), line: { color: colour(i), width: 1 } }, meta: { group: group.name } }));
    draw(plotIn(place), traces, { title: { x: words(one.x ?? ""), y: "samples" }, height: 320, more: { barmode: "overlay", showlegend: traces.length > 1, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 }, xaxis: { range: [number(one.edges[0]), number(last(one.edges))] } },
      alt: `Distribution of ${one.x ?? "values"} for ${one.groups.map((group) => group.name).join(" and ")}.` });
  }

  /* 8-bit grey or RGB pixels, one after the other, row by row. */
  function picture(text, [height, width, channels = 1], alt) {
    const canvas = element("canvas", { width, height, role: "img", "aria-label": alt });
    const bytes = atob(text), image = new ImageData(width, height);
    for (let i = 0; i < width * height; i++) {
      for (let c = 0; c < 3; c++) image.data[4 * i + c] = bytes.charCodeAt(channels === 3 ? 3 * i + c : i);
      image.data[4 * i + 3] = 255;
    }
    canvas.getContext("2d").putImageData(image, 0, 0);
    return canvas;
  }

  function images(one, place) {
    place.append(element("ul", { class: "pictures" }, ...one.items.map((item) => {
      const facts = Object.entries(item.facts ?? {});
      const line = ([name, value]) => {
        if (typeof value === "boolean") return element("div", { class: value ? "wrong" : "right" }, value ? words(name) : `not ${words(name)}`);
        return element("div", {}, `${words(name)} `, typeof value === "number" ? put(element("span"), value) : String(value));
      };
      return element("li", {}, picture(item.pixels, one.shape, facts.map(([name, value]) => `${words(name)} ${value}`).join(", ")), ...facts.map(line));
    })));
  }

  const anyCell = (value) => {
    if (typeof value === "number") return cell(value);
    if (typeof value === "boolean") return element("td", { class: value ? "wrong" : "" }, value ? "yes" : "no");
    return value === null || value === undefined ? cell(NaN) : element("td", {}, String(value));
  };

  function ranking(one, place) {
    const box = element("div", { class: "box" }, table(one.caption ?? one.title, ["rank", ...one.columns.map(words)], one.rows.map((row, i) => [element("th", { scope: "row" }, String(i + 1)), ...row.map(anyCell)])));
    place.append(box);
  }

  function byClient(one, place, run) {
    const series = Object.entries(one.values), count = Math.max(...series.map(([, values]) => values.length)), at = Array.from({ length: count }, (_, i) => i);
    const names = at.map((i) => clientName(run, i));
    const traces = series.map(([name, values], i) => ({ type: "bar", x: at, y: values.map(number), name: harmless(words(name)), marker: { color: colour(i) }, customdata: names.map(harmless), hovertemplate: "client %{customdata}: %{y:.4f}<extra></extra>", meta: { series: name } }));
    draw(plotIn(place), traces, { title: { x: "client", y: series.length === 1 ? words(series[0][0]) : "" }, height: 300, more: { showlegend: series.length > 1, bargap: 0.15, xaxis: count <= 30 ? { tickvals: at, ticktext: names.map(harmless) } : {} },
      alt: series.map(([name, values]) => `${words(name)} of ${values.length} clients, from ${Math.min(...values.map(number))} to ${Math.max(...values.map(number))}`).join("; ") });
    const sorted = series.map(([name, values]) => [name, values.map(number).filter((value) => !Number.isNaN(value)).sort((a, b) => a - b)]).filter(([, values]) => values.length);
    place.append(element("div", { class: "box" }, table(`Over ${count} clients`, ["", "lowest", "median", "mean", "highest"], sorted.map(([name, values]) => {
      const half = (values.length - 1) / 2;
      return [rowHead(words(name)), cell(values[0]), cell((values[Math.floor(half)] + values[Math.ceil(half)]) / 2), cell(spread(values).mean), cell(last(values))];
    }))));
  }

  let drawnFindings = "";
  function findings() {
    const found = content.runs.map((run, i) => i).filter((i) => content.runs[i].findings?.length);
    if (!show("findings", found.length)) return;
    const most = Math.max(...found.map((i) => content.runs[i].findings.length));
    state.run["findings-run"] ??= found.find((i) => content.runs[i].findings.length === most);
    const chosen = runPicker("findings-run", found), run = content.runs[chosen], key = JSON.stringify([tone("ground"), narrow(), chosen, run.findings]);
    if (key === drawnFindings) return;
    drawnFindings = key;
    const place = by("findings-list");
    place.replaceChildren();
    for (const one of run.findings) finding(one, run, place);
  }

  let drawnStudies = "";
  function studies() {
    if (!show("studies", content.studies.length)) return;
    const key = JSON.stringify([tone("ground"), narrow(), content.studies, state.run]);
    if (key === drawnStudies) return;
    drawnStudies = key;
    const place = by("studies");
    place.replaceChildren();
    for (const study of content.studies) ({ influence, personalisation })[study.kind](study, place);
  }

  function figureCard(name, value, note, mark) {
    const made = element("article", { class: "card" }, element("h3", {}, name), put(element("p", { class: "big" }), number(value)), element("p", { class: "of" }, note));
    if (mark) made.style.setProperty("--mark", mark);
    return made;
  }

  function influence(study, place) {
    place.append(element("h2", {}, `Influence of instances: ${[study.task.data, study.task.model, study.method].filter(Boolean).join(", ")}`));
    const scores = study.scores ?? {};
    const figures = [["R²", scores.r2, "of predicted against actual changes"], ["F1", scores.f1, "of finding harmful instances"], ["Pearson", scores.pearson, "correlation of predicted and actual"], ["Validation accuracy", study.val_accuracy, "of the trained model"],
      ["Residual", study.residual, "of the linear system behind the prediction"]].filter(([, value]) => value !== null && value !== undefined);
    place.append(element("div", { class: "cards" }, ...figures.map(([name, value, note], i) => figureCard(name, value, note, colour(i)))));
    if (study.removed.length) {
      place.append(element("h3", {}, "Predicted and actual change by removal"), element("p", { class: "note" }, `Change of the validation loss, summed over clients, when one training instance is removed and the model is trained again: ${study.removed.length} removals of the largest predictions. On the line the prediction is exact.`));
      const actual = study.removed.map((one) => number(one.actual)), predicted = study.removed.map((one) => number(one.prediction)), both = [...actual, ...predicted].filter(Number.isFinite), ends = [Math.min(...both), Math.max(...both)];
      const group = (wrong) => study.removed.filter((one) => Boolean(one.wrong) === wrong);
      const dots = [false, true].filter((wrong) => group(wrong).length).map((wrong) => ({ type: "scatter", mode: "markers", name: wrong ? "label made wrong" : "label as it was", x: group(wrong).map((one) => number(one.actual)), y: group(wrong).map((one) => number(one.prediction)),
        marker: { color: tinted(colour(wrong ? 1 : 0), 0.75), size: 9, symbol: wrong ? "x" : "circle" }, customdata: group(wrong).map((one) => [one.client, one.sample, harmless(one.label)]), hovertemplate: "client %{customdata[0]}, sample %{customdata[1]}, label %{customdata[2]}<br>actual %{x:.4g}, predicted %{y:.4g}<extra></extra>", meta: { wrong } }));
      const div = plotIn(place);
      div.id = "removals-plot";
      draw(div, [{ type: "scatter", mode: "lines", x: ends, y: ends, line: { color: tone("soft"), width: 1, dash: "dot" }, hoverinfo: "skip", showlegend: false, meta: { part: "diagonal" } }, ...dots],
        { title: { x: "actual change", y: "predicted change" }, height: narrow() ? 360 : 460, more: { showlegend: dots.length > 1 }, alt: `Predicted against actual changes of ${study.removed.length} removals; R2 is ${scores.r2}.` });
    }
    for (const [kind, what, rows] of [["harmful", "Most harmful instances: removal lowers the loss", study.harmful], ["helpful", "Most helpful instances: removal raises the loss", study.helpful]]) {
      if (!rows.length) continue;
      const box = element("div", { class: "box", id: `instances-${kind}` }, table(`${rows.length} of ${study.num_instances} instances, by what their removal is predicted to add to the validation loss summed over clients`, ["rank", "client", "sample", "label", "made wrong", "predicted change", "actual change"],
        rows.map((one, i) => [element("th", { scope: "row" }, String(i + 1)), cell(number(one.client)), cell(number(one.sample)), anyCell(one.label), anyCell(Boolean(one.wrong)), cell(number(one.prediction)), one.actual === null ? element("td", { class: "none" }, "not tried") : cell(number(one.actual))])));
      place.append(element("h3", {}, what), box);
    }
    for (const one of study.findings ?? []) finding(one, null, place);
    const facts = [["total validation loss", study.loss], ["|mean g_y| of the trained model", study.lower_gradient], ["peers' u differ by", study.disagreement], ["noise of training", study.noise], ...Object.entries(study.cost ?? {}).map(([name, value]) => [`prediction: ${words(name)}`, value]), ...Object.entries(study.seconds ?? {}).map(([name, value]) => [`seconds of ${words(name)}`, value])]
      .filter(([, value]) => value !== null && value !== undefined);
    place.append(element("h3", {}, "What it cost"), element("div", { class: "box" }, table("Cost of the prediction, summed over clients, and seconds of every step", ["", "value"], facts.map(([name, value]) => [rowHead(name), cell(number(value))]))));
  }

  function personalisation(study, place) {
    const methods = [...new Set(study.outcomes.map((one) => one.method))], networks = [...new Set(study.outcomes.map((one) => one.network))];
    const of = (method, network) => study.outcomes.filter((one) => one.method === method && one.network === network);
    place.append(element("h2", {}, `Personalisation: ${[study.task.data, study.task.model, study.task.num_clients ? `${study.task.num_clients} clients` : null].filter(Boolean).join(", ")}`));
    const entries = methods.flatMap((method, i) => networks.filter((network) => of(method, network).length).map((network) => [method, network, i]));
    const best = entries.map(([method, network, i]) => ({ method, network, i, found: spread(of(method, network).map((one) => number(one.test_accuracy))) }));
    place.append(element("div", { class: "cards" }, ...methods.map((method, i) => {
      const mine = best.filter((one) => one.method === method).sort((a, b) => b.found.mean - a.found.mean)[0];
      return figureCard(method, mine.found.mean, `test accuracy, best on ${words(mine.network)}`, colour(i));
    })));
    const columns = { test_accuracy: "test accuracy", bottom_decile: "bottom decile", validation_accuracy: "validation accuracy", rounds: "rounds", megabytes: "MB", seconds: "seconds" };
    const box = element("div", { class: "box", id: "personalisation-table" }, table("Where validation accuracy was best, mean ± standard deviation over repetitions; the bottom decile is the accuracy of the client below which a tenth of them lie", ["method", "network", "runs", ...Object.values(columns)],
      entries.map(([method, network, i]) => [rowHead(method, colour(i)), element("td", { class: "left" }, words(network)), cell(of(method, network).length), ...Object.keys(columns).map((name) => spreadCell(of(method, network).map((one) => number(one[name]))))])));
    box.querySelectorAll("thead th")[1].className = "left";
    place.append(element("h3", {}, "Accuracy and cost"), box);
    if (!study.outcomes.some((one) => one.accuracies?.length)) return;
    place.append(element("h3", {}, "Test accuracy of every client"), element("p", { class: "note" }, "Each dot is a client, the box holds the middle half of them and the line in it is the median."));
    const several = networks.length > 1, div = plotIn(place);
    div.id = "accuracies-plot";
    const traces = networks.map((network, k) => {
      const pairs = methods.flatMap((method) => of(method, network).flatMap((one) => (one.accuracies ?? []).map((value) => [method, number(value)])));
      return { type: "box", name: harmless(words(network)), x: pairs.map(([method]) => harmless(method)), y: pairs.map(([, value]) => value), boxpoints: "all", pointpos: 0, jitter: 0.5, marker: { color: colour(k), size: 3, opacity: 0.6 }, line: { width: 1.5, color: colour(k) }, meta: { network } };
    });
    draw(div, traces, { title: { y: "test accuracy" }, height: 420, more: { boxmode: "group", showlegend: several, xaxis: { type: "category" } }, alt: `Test accuracies of single clients, by method${several ? " and network" : ""}.` });
  }

  // ---- configuration -----------------------------------------------------------------------------------------------------------

  async function copy(text, button) {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = element("textarea", { "aria-hidden": "true" });
      area.value = text;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  }

  let drawnConfiguration = "";
  function configuration() {
    const records = [...content.runs.map((run, i) => ({ name: runName(i), path: run.path, config: run.config, versions: run.versions, state: run.state, planned: run.planned })), ...content.studies.map((study) => ({ name: study.kind, path: study.path, config: study.config, versions: study.versions }))];
    if (!show("configuration", records.length)) return;
    const key = JSON.stringify(records);
    if (key === drawnConfiguration) return;
    drawnConfiguration = key;
    const opened = new Set([...by("configurations").querySelectorAll("details[open] summary")].map((one) => one.textContent));
    const kinds = [...new Map(records.map((one) => [JSON.stringify(one.versions), one.versions])).values()], names = [...new Set(kinds.flatMap((one) => Object.keys(one)))];
    by("versions").replaceChildren(table(kinds.length > 1 ? "Versions that wrote these records" : "Versions that wrote this record", names, kinds.map((one) => names.map((name) => element("td", {}, String(one[name] ?? "–"))))));
    const texts = new Map();
    for (const one of records) texts.set(one.config.text, [...(texts.get(one.config.text) ?? []), one]);
    by("configurations").replaceChildren(...[...texts.entries()].map(([text, some]) => {
      const button = element("button", { type: "button" }, "Copy");
      button.addEventListener("click", () => copy(text, button));
      const title = some.length > 3 ? `${some[0].config.kind} of ${some.length} runs in ${some[0].path}` : some.map((one) => one.name).join("; ");
      const made = element("details", { open: texts.size === 1 || opened.has(title) }, element("summary", {}, title), element("div", { class: "body" }, element("div", { class: "head" }, element("span", {}, `${some[0].config.kind} in ${some[0].path}`), button), element("pre", { tabindex: "0" }, text)));
      return made;
    }));
  }

  // ---- while a run goes on -------------------------------------------------------------------------------------------------------

  let asked = null;
  let lost = false;
  function status() {
    const going = content.runs.filter((run) => run.state === "going"), stopped = content.runs.filter((run) => run.state === "stopped"), wrong = content.runs.filter(isLost);
    const alone = content.runs.length === 1;
    const who = (run) => (alone ? "" : runName(content.runs.indexOf(run)));
    const told = (sentences) => [...sentences.slice(0, MOST_TOLD), ...(sentences.length > MOST_TOLD ? [`And ${sentences.length - MOST_TOLD} more.`] : [])].join(" ");
    const ended = (text) => (/[.!?]$/.test(text) ? text : `${text}.`);
    const failures = told(wrong.map((run) => ended(failure(run, who(run)))));
    /* Every run by itself: one that goes on must not hide one that is dead. */
    const silences = () => told(going.map((run) => [run, Math.floor((Date.now() / 1000 - (run.written ?? 0)) / 60)]).filter(([, minutes]) => minutes >= SILENT)
      .map(([run, minutes]) => `Nothing new${alone ? "" : ` from ${who(run)}`} for ${minutes} min: it computes, or its process has ended${run.resumable ? ` (then: fedbilevel resume ${run.path})` : ""}.`));
    const place = by("status");
    place.className = "status";
    const where = (run) => {
      const name = run.planned.rounds ? "rounds" : "iteration", done = last(column(run, name)) || 0;
      return `${run.algorithm}: ${name === "rounds" ? `${done}` : `outer iteration ${done}`}${run.planned[name] ? ` of ${run.planned[name]}` : ""}${name === "rounds" ? " rounds" : ""}`;
    };
    let text = "";
    if (lost) { text = `The connection to fedbilevel watch is lost; this is what was known at ${asked}.`; place.classList.add("lost"); }
    else if (LIVE && content.over) { text = failures || (stopped.length ? `${alone ? "The run was" : "Runs were"} stopped (${stopped.map(where).join("; ")}).` : content.runs.length > 1 ? "The runs have finished." : "The run has finished."); place.classList.add("over"); }
    else if (going.length) {
      const first = going.some((run) => (run.columns.iteration ?? []).length);
      text = `${LIVE ? "Running" : "Not finished when this was written"}: ${going.map(where).join("; ")}.${LIVE && !first ? " No measurement yet." : ""}`;
      text = [text, LIVE ? silences() : "", failures].filter(Boolean).join(" ");
    } else if (stopped.length || wrong.length) text = [stopped.length ? `Stopped before its end: ${stopped.map(where).join("; ")}.` : "", failures].filter(Boolean).join(" ");
    else if (LIVE) text = "What is recorded so far; more will appear here.";
    if (wrong.length) place.classList.add("wrong-end");
    place.textContent = text;
    place.hidden = !text;
  }

  async function ask() {
    try {
      const answer = await fetch("data.json", { cache: "no-store" });
      if (!answer.ok) throw new Error(String(answer.status));
      const newer = await answer.json();
      const same = (one) => JSON.stringify({ ...one, made: null });
      const changed = same(newer) !== same(content) || lost;
      [content, lost, asked] = [newer, false, new Date().toLocaleTimeString()];
      if (changed) render(); else status();
    } catch {
      if (!lost) { lost = true; status(); }
    }
    if (!(content.over && !lost)) setTimeout(ask, EVERY);
  }

  // ---- all of it -----------------------------------------------------------------------------------------------------------------

  const PARTS = [heading, curves, status, cards, targets, finals, studies, findings, partition, diagnostics, ledger, configuration];

  /* Some parts of the page, or all. */
  function render(...parts) {
    for (const part of parts.length ? parts : PARTS) {
      try {
        part();
      } catch (error) { // what one record holds must not hide the others
        console.error(error);
        const note = document.createElement("p");
        note.className = "note";
        note.textContent = `The part "${part.name}" cannot be drawn: ${error.message}.`;
        document.querySelector("main").prepend(note);
      }
    }
    document.documentElement.dataset.drawn = String(Number(document.documentElement.dataset.drawn ?? 0) + 1);
  }

  const changes = (id, change, ...parts) => by(id).addEventListener("change", (event) => { change(event.target); render(...parts); });
  changes("metric", (select) => {
    if (!state.typed && !content.target) state.target = { metric: select.value, value: null };
    state.metric = select.value;
  }, curves, cards, targets);
  changes("log", (box) => { state.log = box.checked; }, curves);
  changes("target-metric", (select) => { state.target = { metric: select.value, value: content.target?.metric === select.value ? number(content.target.value) : null }; state.typed = false; }, targets);
  by("target-value").addEventListener("input", (event) => { state.typed = true; state.target.value = event.target.value === "" ? NaN : Number(event.target.value); targets(); });
  changes("partition-role", (select) => { state.role = select.value; }, partition);
  changes("ledger-column", (select) => { state.column = select.value; }, ledger);
  for (const [id, part] of [["partition-run", partition], ["findings-run", findings], ["ledger-run", ledger]]) changes(id, (select) => { state.run[id] = Number(select.value); }, part);

  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const theme = () => document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light");
  const nameTheme = () => { by("theme-name").textContent = theme() === "dark" ? "Light" : "Dark"; };
  by("theme").addEventListener("click", () => { document.documentElement.dataset.theme = theme() === "dark" ? "light" : "dark"; nameTheme(); render(); });
  dark.addEventListener("change", () => { nameTheme(); render(); });
  nameTheme();

  let wide = narrow();
  window.addEventListener("resize", () => { if (wide !== narrow()) { wide = narrow(); render(); } });

  // on paper: light, as wide as the paper, and with the configuration where it is not too long
  const plots = () => [...document.querySelectorAll(".js-plotly-plot")].filter((div) => div.offsetParent !== null);
  window.addEventListener("beforeprint", () => {
    const folded = [...document.querySelectorAll("details:not([open])")];
    onScreen = { theme: document.documentElement.dataset.theme, folded: folded.length <= MOST_UNFOLDED ? folded : [] };
    document.documentElement.dataset.theme = "light";
    for (const one of onScreen.folded) one.open = true;
    render();
    for (const div of plots()) Plotly.relayout(div, { width: Math.min(div.clientWidth, PAPER), autosize: false });
  });
  window.addEventListener("afterprint", () => {
    if (!onScreen) return;
    for (const one of onScreen.folded) one.open = false;
    if (onScreen.theme) document.documentElement.dataset.theme = onScreen.theme;
    else delete document.documentElement.dataset.theme;
    onScreen = null;
    render();
    for (const div of plots()) Plotly.relayout(div, { width: null, autosize: true });
  });

  render();
  if (LIVE && !content.over) setTimeout(ask, EVERY);
})();
