// ---- data of each client --------------------------------------------------------------------------------------------

const clientName = (run, i) => run?.client_names?.[i] ?? String(i);
const runName = (number, all = content) => {
  const run = all.runs[number],
    curve = all.curves.find((one) => one.runs.includes(number));
  const seeds =
    curve.runs.length > 1
      ? `, seed ${[run.seed, run.data_seed].filter((seed) => seed !== null && seed !== undefined).join("/")}`
      : "";
  return curve.name + seeds;
};

function runPicker(id, numbers) {
  const entries = numbers.map((number) => [number, runName(number)]);
  const twice = entries.map(([number, name]) => [
    number,
    entries.filter((other) => other[1] === name).length > 1 ? `${name} [${content.runs[number].path}]` : name,
  ]);
  const chosen = Number(options(id, twice, state.run[id]));
  by(`${id}-label`).hidden = numbers.length < 2;
  state.run[id] = chosen;
  return chosen;
}

const scale = () =>
  tone("ground") === "#ffffff"
    ? [
        [0, "#f3f7fb"],
        [0.001, "#d8e8f5"],
        [0.5, "#4f9ccf"],
        [1, "#00406b"],
      ]
    : [
        [0, "#191e24"],
        [0.001, "#1d3346"],
        [0.5, "#2f7fb3"],
        [1, "#bfe3ff"],
      ];

function partition() {
  if (!show("partition", content.partitions.length)) return;
  const firsts = content.partitions.map((one) => one.runs[0]);
  const chosen = runPicker("partition-run", firsts);
  const { clients } = content.partitions[firsts.indexOf(chosen)];
  const role = (state.role = options(
    "partition-role",
    Object.keys(clients.sizes).map((name) => [name, words(name)]),
    state.role,
  ));
  const sizes = clients.sizes[role],
    labels = clients.labels?.[role];
  const names = sizes.map((_, i) => clientName(content.runs[chosen], i)),
    x = sizes.map((_, i) => i);
  const bars = {
    type: "bar",
    x,
    y: sizes,
    marker: { color: COLOURS[0] },
    customdata: names.map(harmless),
    hovertemplate: "client %{customdata}: %{y} samples<extra></extra>",
    showlegend: false,
    meta: { part: "sizes" },
  };
  const ticks = names.length <= 30 ? { tickvals: x, ticktext: names.map(harmless) } : {};
  const traces = [bars];
  const more = {
    bargap: 0.15,
    xaxis: { ...ticks, range: [-0.5, x.length - 0.5] },
    yaxis: { title: { text: "samples" } },
  };
  let height = 260;
  if (labels) {
    const cells = labels.counts.length * sizes.length;
    const most = Math.max(1, ...labels.counts.flat());
    traces.push({
      type: "heatmap",
      x,
      y: labels.values.map((_, i) => i),
      z: labels.counts,
      yaxis: "y2",
      colorscale: scale(),
      zmin: 0,
      zmax: most,
      showscale: !narrow(),
      colorbar: { title: { text: "samples" }, thickness: 12, len: 0.72, y: 0.36, outlinewidth: 0 },
      xgap: 1,
      ygap: 1,
      text: labels.counts.map((row) => row.map((count) => (count ? String(count) : ""))),
      texttemplate: cells <= MOST_LABELLED && !narrow() ? "%{text}" : undefined,
      textfont: { size: 11 },
      customdata: labels.counts.map((row, i) => row.map((_, j) => [harmless(names[j]), harmless(labels.values[i])])),
      hovertemplate: "client %{customdata[0]}, label %{customdata[1]}: %{z} samples<extra></extra>",
      meta: { part: "counts" },
    });
    height = Math.min(760, 220 + 24 * labels.values.length);
    const step = Math.ceil(labels.values.length / 30),
      places = labels.values.map((_, i) => i).filter((i) => i % step === 0);
    more.yaxis = { title: { text: "samples" }, domain: [0.8, 1], nticks: 4 };
    more.yaxis2 = {
      title: { text: "label" },
      domain: [0, 0.74],
      automargin: true,
      autorange: "reversed",
      tickvals: places,
      ticktext: places.map((i) => harmless(labels.values[i])),
      gridcolor: "rgba(0,0,0,0)",
      linecolor: tone("line"),
      zeroline: false,
    };
    more.xaxis = { ...more.xaxis, anchor: "y2", showgrid: false, zeroline: false };
  }
  draw("partition-plot", traces, {
    title: { x: "client", y: "samples" },
    height,
    more,
    alt:
      `How many ${words(role)} samples each of ${sizes.length} clients holds${labels ? ", by label" : ""}. ` +
      `Least ${Math.min(...sizes)}, most ${Math.max(...sizes)}.`,
  });
  const total = sizes.reduce((sum, size) => sum + size, 0);
  by("partition-note").textContent =
    `${shown(total)} ${words(role)} samples at ${sizes.length} clients, ` +
    `from ${shown(Math.min(...sizes))} to ${shown(Math.max(...sizes))} each.`;
}
