// ---- sections -------------------------------------------------------------------------------------------------------

function heading() {
  document.title = records.title;
  by("title").textContent = records.title;
  const count = (many, one, several = `${one}s`) => `${many} ${String(many) === "1" ? one : several}`;
  const said = [];
  if (records.runs.length) {
    const clients = [...new Set(records.runs.map((run) => run.num_clients).filter((n) => n))];
    const names = [...new Set(records.curves.map((curve) => curve.algorithm))];
    said.push(names.length <= 6 ? names.join(", ") : count(names.length, "algorithm"));
    if (clients.length)
      said.push(
        records.runs.every((run) => run.engine === "peers")
          ? `${clients.join(" or ")} peers`
          : count(clients.join(" or "), "client"),
      );
    said.push(count(records.runs.length, "run"));
    if (records.curves.some((curve) => curve.runs.length > 1))
      said.push(`${[...new Set(records.curves.map((curve) => curve.runs.length))].join(" or ")} seeds each`);
  }
  for (const study of records.studies) {
    if (study.kind === "influence")
      said.push(
        `${study.method} on ${study.task.data ?? "data"}`,
        count(study.num_instances, "instance"),
        `${count(study.removed.length, "removal")} tried`,
      );
    else
      said.push(
        `${count(new Set(study.outcomes.map((one) => one.method)).size, "method")} on ` +
          count(new Set(study.outcomes.map((one) => one.network)).size, "network"),
      );
  }
  by("what").textContent = said.join(" · ");
  const time = records.made.time.replace("T", " ").replace("+00:00", " UTC");
  by("made").textContent =
    `${LIVE ? "Served" : "Written"} by fedbilevel ${records.made.fedbilevel}, ${time}. ` +
    "Numbers are shown with four digits; point at one for its exact value. " +
    "Underlined words are explained when you point at them or reach them by Tab.";
}

function cards() {
  if (!show("headline", content.runs.length && content.metrics.length && !cleaning())) return;
  by("cards").replaceChildren(
    ...content.curves.slice(0, MOST_CARDS).map((curve, i) => {
      const runs = whole(curve);
      const of = (name) => runs.map((run) => last(column(run, name))).filter((value) => !Number.isNaN(value));
      const figure = of(state.metric);
      const big = element("p", { class: "big" });
      if (figure.length) {
        const found = spread(figure);
        big.append(shown(found.mean));
        if (found.count > 1) big.append(element("small", {}, ` ± ${shownDeviation(found.deviation)}`));
        big.dataset.value = String(found.mean);
        big.title =
          found.count > 1 ? `${found.mean} ± ${found.deviation} over ${found.count} runs` : String(found.mean);
      } else big.append("–");
      const others = content.metrics.filter((name) => name !== state.metric && !name.includes("loss")).slice(0, 2);
      const entries = [
        ...others.map((name) => [words(name), name]),
        ["rounds", "rounds"],
        ["megabytes", "megabytes"],
        ["oracle calls", "calls"],
        ["seconds", "seconds"],
      ];
      const made = element(
        "article",
        { class: "card" },
        element("h3", {}, label(curve)),
        big,
        element(
          "p",
          { class: "of" },
          `${runs.length && runs.every((run) => run.state === "finished") ? "final" : "last"} ${words(state.metric)}`,
          figure.length > 1 ? `, mean of ${figure.length} seeds` : "",
        ),
        ...[
          ...new Set(
            runsOf(curve)
              .filter(isLost)
              .map((run) => failure(run)),
          ),
        ].map((text) => element("p", { class: "why" }, text)),
        ...[...new Set(runs.flatMap((run) => run.notes ?? []))].map((text) => element("p", { class: "of" }, text)),
        element(
          "dl",
          {},
          ...entries.flatMap(([text, name]) => {
            const values = of(name);
            return values.length ? [element("dt", {}, explained(text)), put(element("dd"), spread(values).mean)] : [];
          }),
        ),
      );
      made.style.setProperty("--mark", colour(i));
      return made;
    }),
  );
}

const axes = () =>
  Object.keys(AXES).filter((name) =>
    content.runs.some((run) => column(run, name).some((value) => !Number.isNaN(value))),
  );

function curves() {
  const measured = content.metrics.length && content.runs.some((run) => (run.columns.iteration ?? []).length);
  show("curves", measured && !cleaning());
  if (!measured) return;
  state.metric = options(
    "metric",
    content.metrics.map((name) => [name, words(name)]),
    state.metric ?? content.target?.metric,
  );
  if (cleaning()) return;
  const known = axes();
  if (!known.includes(state.axis)) state.axis = known[0];
  segments(
    "axis",
    known.map((name) => [name, SHORT[name]]),
    state.axis,
    (value) => {
      state.axis = value;
      render(curves, diagnostics);
    },
  );
  by("log").checked = state.log;
  const several = lines("curves-plot", state.metric, { log: state.log });
  const mixed = isMixed() ? "These lines belong to different tasks and are not comparable. " : "";
  const bands =
    "Lines are means over runs that differ in their seeds only; bands reach from the lowest to the highest.";
  by("curves-note").textContent = mixed + (several ? bands : "");
  by("curves-note").hidden = !mixed && !several;
}

const falls = (metric) => content.falls.includes(metric);
/* Whether a run reaches the value from below, as compare.Target decides: falling figures reach it from above, others
   from the side of their first finite measurement. */
const rises = (values, metric, value) => !falls(metric) && values.find(Number.isFinite) < value;

/* The first finite measurement at or beyond the value; -1 where there is none. */
function reached(values, metric, value) {
  const up = rises(values, metric, value);
  return values.findIndex((one) => Number.isFinite(one) && (up ? one >= value : one <= value));
}

/* Without a given target: of the last values of all runs, also rounded to four digits, the hardest that most reach. */
function easiest(metric) {
  const runs = content.curves.flatMap(whole).map((run) => column(run, metric).filter(Number.isFinite)),
    ways = runs.filter((values) => values.length);
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
  const sides = new Set(
    content.curves
      .flatMap(whole)
      .map((run) => column(run, metric))
      .filter((values) => values.some(Number.isFinite))
      .map((values) => rises(values, metric, value)),
  );
  return sides.size !== 1 ? "at or beyond" : sides.has(true) ? "at or above" : "at or below";
}

function targets() {
  const names = [...content.metrics, ...content.diagnostics];
  const measured = names.length && content.curves.some((curve) => whole(curve).length);
  if (!show("target", measured && !cleaning())) return;
  if (!state.target)
    state.target = content.target
      ? { ...content.target, value: number(content.target.value) }
      : { metric: state.metric, value: null };
  if (!names.includes(state.target.metric)) state.target.metric = names[0];
  options(
    "target-metric",
    names.map((name) => [name, words(name)]),
    state.target.metric,
  );
  const given = state.typed || (content.target && content.target.metric === state.target.metric);
  const usual = given ? null : easiest(state.target.metric);
  if (usual) state.target.value = usual.value;
  const input = by("target-value"),
    { metric, value } = state.target;
  if (document.activeElement !== input) input.value = value === null || Number.isNaN(value) ? "" : String(value);
  const every = content.runs.some((run) => run.state === "diverged") ? "every run that did not diverge" : "every run";
  const about = () =>
    usual.many === usual.all
      ? `${every} reaches this value`
      : `${usual.many} of ${usual.all} runs reach this value, and no value is reached by ${every}`;
  by("target-note").textContent = usual?.many ? `No target was given: ${about()}. Type another value.` : "";
  by("target-note").hidden = !usual?.many;
  if (value === null || Number.isNaN(value)) {
    by("target-table").replaceChildren(element("p", { class: "note" }, "Type the value to reach."));
    return;
  }
  const rows = content.curves.map((curve, i) => {
    const all = runsOf(curve);
    const there = whole(curve)
      .map((run) => [run, reached(column(run, metric), metric, value)])
      .filter(([, at]) => at >= 0);
    const head = [rowHead(label(curve), colour(i)), put(element("td"), there.length)];
    head[1].dataset.csv = head[1].textContent = `${there.length} of ${all.length}`;
    if (!there.length)
      return [...head, element("td", { colspan: Object.keys(COSTS).length, class: "none" }, "not reached")];
    return [...head, ...Object.keys(COSTS).map((cost) => spreadCell(there.map(([run, at]) => column(run, cost)[at])))];
  });
  const several = content.curves.some((curve) => curve.runs.length > 1);
  by("target-table").replaceChildren(
    table(
      `Paid, summed over clients, at the first measurement where ${words(metric)} is ${side(metric, value)} ` +
        typed(value) +
        (several ? "; mean ± standard deviation over the runs that reached it" : ""),
      ["curve", "reached", ...Object.values(COSTS)],
      rows,
    ),
  );
}

function finals() {
  const names = [...content.metrics, ...content.diagnostics];
  if (
    !show(
      "finals",
      content.curves.some((curve) => whole(curve).length),
    )
  )
    return;
  const costs = { ...COSTS, calls: "oracle calls" },
    several = content.curves.some((curve) => curve.runs.length > 1) ? ", mean ± standard deviation over runs" : "";
  const rows = (some) =>
    content.curves.map((curve, i) => [
      rowHead(label(curve), colour(i)),
      cell(whole(curve).length),
      ...some.map((name) => spreadCell(whole(curve).map((run) => last(column(run, name))))),
    ]);
  const parts = onScreen
    ? names.map((_, i) => names.slice(i, i + MOST_COLUMNS)).filter((_, i) => i % MOST_COLUMNS === 0)
    : [names]; // paper does not scroll
  if (names.length)
    by("finals-table").replaceChildren(
      ...parts.map((some) =>
        table(`At the last measurement${several}`, ["curve", "runs", ...some.map(words)], rows(some)),
      ),
    );
  show("finals-table", names.length);
  by("costs-table").replaceChildren(
    table(
      `Paid until then, summed over clients${several}`,
      ["curve", "runs", ...Object.values(costs)],
      rows(Object.keys(costs)),
    ),
  );
}

function diagnostics() {
  if (!show("diagnostics", content.diagnostics.length)) return;
  by("diagnostics-note").textContent = content.diagnostics
    .map((name) => `${words(name)[0].toUpperCase()}${words(name).slice(1)}: ${meaning(name)}`)
    .join(" ");
  const place = by("diagnostics-plots");
  for (const name of content.diagnostics) {
    if (!by(`diagnostics-${name}`))
      place.append(
        element(
          "div",
          {},
          element("h3", {}, words(name)),
          element("div", { class: "plot", role: "img", id: `diagnostics-${name}` }),
        ),
      );
  }
  for (const name of records.diagnostics) {
    const drawn = by(`diagnostics-${name}`);
    if (drawn) drawn.parentElement.hidden = !content.diagnostics.includes(name); // another task may lack it
  }
  for (const name of content.diagnostics)
    lines(`diagnostics-${name}`, name, { log: true, height: narrow() ? 300 : 340 }); // now that each has its width
}
