// ---- costs ----------------------------------------------------------------------------------------------------------

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
  const parts = content.curves
    .map((curve, i) => ({
      curve,
      i,
      runs: runsOf(curve).filter((run) => run.ledger?.phases && Object.keys(run.ledger.phases).length),
    }))
    .filter((one) => one.runs.length);
  const phases = [...new Set(parts.flatMap((one) => one.runs.flatMap((run) => Object.keys(run.ledger.phases))))];
  by("ledger-plot").hidden = by("ledger-table").hidden = !phases.length;
  by("ledger-unit").closest(".controls").hidden = !phases.length;
  if (phases.length) {
    segments("ledger-unit", Object.entries(UNITS), state.unit, (value) => {
      state.unit = value;
      render(ledger);
    });
    const values = (one, phase, cost) =>
      one.runs.map((run) => (run.ledger.phases[phase] ? phaseCosts[cost](run.ledger.phases[phase]) : 0));
    const traces = phases.map((phase, k) => ({
      type: "bar",
      orientation: "h",
      name: harmless(words(phase)),
      y: parts.map((_, i) => i),
      x: parts.map((one) => spread(values(one, phase, state.unit)).mean),
      marker: { color: colour(k), pattern: { shape: ["", "/", ".", "x"][Math.floor(k / COLOURS.length) % 4] } },
      hovertemplate: "%{x}<extra>%{fullData.name}</extra>",
      meta: { phase },
    }));
    const text = parts.map((one) => shortName(one.curve));
    draw("ledger-plot", traces, {
      title: { x: UNITS[state.unit] },
      height: 130 + 44 * parts.length + 20 * Math.ceil(phases.length / (narrow() ? 2 : 5)),
      margin: { l: 12 },
      more: {
        barmode: "stack",
        yaxis: { tickvals: parts.map((_, i) => i), ticktext: text, autorange: "reversed", showgrid: false },
        legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, traceorder: "normal" },
        showlegend: true,
      },
      alt: `${UNITS[state.unit]} of every phase, as stacked bars, one per curve. The values are in the table below.`,
    });
    const names = {
      rounds: "rounds",
      bytes_up: "bytes up",
      bytes_down: "bytes down",
      gradients: "gradients",
      products: "products",
      calls: "oracle calls",
      samples: "samples",
    };
    const rows = parts.flatMap((one) => {
      const own = phases.filter((phase) => one.runs.some((run) => run.ledger.phases[phase]));
      const line = (phase) => [
        rowHead(one.curve.name, colour(one.i)),
        element("td", { class: "left" }, words(phase)),
        ...Object.keys(names).map((cost) => spreadCell(values(one, phase, cost))),
      ];
      const total = [
        rowHead(one.curve.name, colour(one.i)),
        element("td", { class: "left" }, element("strong", {}, "all phases")),
        ...Object.keys(names).map((cost) =>
          spreadCell(
            one.runs.map((run) =>
              Object.values(run.ledger.phases).reduce((sum, phase) => sum + phaseCosts[cost](phase), 0),
            ),
          ),
        ),
      ];
      return [...own.map(line), total];
    });
    by("ledger-table").replaceChildren(
      table(
        "Costs of every phase, summed over clients" +
          (parts.some((one) => one.runs.length > 1) ? "; mean ± standard deviation over runs" : ""),
        ["curve", "phase", ...Object.values(names)],
        rows,
      ),
    );
    by("ledger-table").querySelectorAll("thead th")[1].className = "left";
  }
  const single = charged.filter(
    (i) =>
      Object.keys(content.runs[i].ledger.clients ?? {}).length ||
      Object.keys(content.runs[i].ledger.edges ?? {}).length,
  );
  if (
    !show(
      "ledger-clients",
      single.some((i) => Object.keys(content.runs[i].ledger.clients ?? {}).length),
    ) &&
    !single.length
  ) {
    show("ledger-edges", false);
    return;
  }
  const chosen = runPicker("ledger-run", single),
    run = content.runs[chosen],
    bill = run.ledger;
  const columns = Object.keys(bill.clients ?? {});
  if (columns.length) {
    state.column = options(
      "ledger-column",
      columns.map((name) => [name, words(name)]),
      state.column ?? (columns.includes("bytes_up") ? "bytes_up" : columns[0]),
    );
    const amounts = bill.clients[state.column].map(number),
      x = amounts.map((_, i) => i),
      names = amounts.map((_, i) => clientName(run, i));
    draw(
      "ledger-clients-plot",
      [
        {
          type: "bar",
          x,
          y: amounts,
          marker: { color: COLOURS[0] },
          customdata: names.map(harmless),
          hovertemplate: "client %{customdata}: %{y}<extra></extra>",
          meta: { column: state.column },
        },
      ],
      {
        title: { x: "client", y: words(state.column) },
        height: 270,
        more: { bargap: 0.15, xaxis: names.length <= 30 ? { tickvals: x, ticktext: names.map(harmless) } : {} },
        alt:
          `${words(state.column)} of each of ${amounts.length} clients, ` +
          `from ${Math.min(...amounts)} to ${Math.max(...amounts)}.`,
      },
    );
  }
  const edges = bill.edges?.bytes;
  if (!show("ledger-edges", edges)) return;
  const names = edges.map((_, i) => clientName(run, i)),
    at = edges.map((_, i) => i),
    ticks = names.length <= 30 ? { tickvals: at, ticktext: names.map(harmless) } : {};
  draw(
    "ledger-edges-plot",
    [
      {
        type: "heatmap",
        x: at,
        y: at,
        z: edges.map((row) => row.map(number)),
        colorscale: scale(),
        zmin: 0,
        xgap: 1,
        ygap: 1,
        colorbar: { title: { text: "bytes" }, thickness: 12, outlinewidth: 0 },
        customdata: edges.map((row, i) => row.map((_, j) => [harmless(names[i]), harmless(names[j])])),
        hovertemplate: "%{customdata[0]} to %{customdata[1]}: %{z} bytes<extra></extra>",
      },
    ],
    {
      title: { x: "receiver", y: "sender" },
      height: Math.min(620, 180 + 22 * edges.length),
      more: {
        xaxis: { ...ticks, showgrid: false, zeroline: false },
        yaxis: { ...ticks, autorange: "reversed", showgrid: false, zeroline: false },
      },
      alt: `Bytes that each of ${edges.length} peers sent to each other.`,
    },
  );
}
