// ---- runs and curves ------------------------------------------------------------------------------------------------

const column = (run, name) => {
  if (name === "calls") return sums(run, CALLS);
  if (name === "gradients") return sums(run, CALLS.slice(0, 4));
  if (name === "products") return sums(run, CALLS.slice(4));
  return (Object.hasOwn(run.columns, name) ? run.columns[name] : []).map(number);
};
const sums = (run, names) =>
  names
    .map((name) => column(run, name))
    .reduce(
      (total, values) => total.map((value, i) => value + (values[i] ?? NaN)),
      run.columns.iteration?.map(() => 0) ?? [],
    );
const last = (values) => (values.length ? values[values.length - 1] : NaN);
const runsOf = (curve) => curve.runs.map((number) => content.runs[number]);
/* The runs that count in means: a diverged run has costs but no figures. */
const whole = (curve) =>
  runsOf(curve).filter((run) => run.state !== "diverged" && (run.columns.iteration ?? []).length);
const colour = (i) => COLOURS[i % COLOURS.length];
const dash = (i) => DASHES[Math.floor(i / COLOURS.length) % DASHES.length];
const tinted = (hex, alpha) => `rgba(${[1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)).join(",")},${alpha})`;
const label = (curve) => {
  const lost = ["diverged", "failed"]
    .map((state) => [state, runsOf(curve).filter((run) => run.state === state).length])
    .filter(([, many]) => many);
  return (
    curve.name +
    (lost.length ? ` (${lost.map(([state, many]) => `${many} of ${curve.runs.length} ${state}`).join(", ")})` : "")
  );
};
const planned = (run) => (run.planned.iteration ? ` of ${run.planned.iteration}` : "");
/* Why a run failed or diverged, in a sentence. */
const failure = (run, who = "") => {
  const how =
    run.state === "diverged" ? "diverged" : `failed after outer iteration ${run.end?.iteration ?? 0}${planned(run)}`;
  return (who ? `${who} ${how}` : how[0].toUpperCase() + how.slice(1)) + (run.end?.why ? `: ${run.end.why}` : ".");
};
const shortName = ({ name }) => {
  const most = narrow() ? 16 : 42;
  return harmless(name.length > most ? `${name.slice(0, most - 1)}…` : name);
};
const isLost = (run) => run.state === "failed" || run.state === "diverged";

/* What a cleaning of labels found, if the page shows one and nothing else; it has no curve, only a start and an end. */
const cleaning = () => (content.runs.length === 1 ? content.runs[0].cleaning : null);

function between(line, at) {
  if (at >= last(line.x)) return last(line.y); // of several values at one place, the last
  const next = line.x.findIndex((x) => x > at);
  const [x0, x1, y0, y1] = [line.x[next - 1], line.x[next], line.y[next - 1], line.y[next]];
  return y0 + ((y1 - y0) * (at - x0)) / (x1 - x0);
}

/* The mean over runs that differ in their seeds, with the lowest and the highest, as far as all of them go. */
function band(curve, axis, metric) {
  const lines = whole(curve)
    .map((run) => {
      const x = column(run, axis),
        y = column(run, metric);
      // a run may lack the metric
      const kept = x.map((_, i) => i).filter((i) => !Number.isNaN(x[i]) && !Number.isNaN(number(y[i])));
      return { x: kept.map((i) => x[i]), y: kept.map((i) => y[i]) };
    })
    .filter((line) => line.x.length);
  if (!lines.length) return null;
  if (lines.length === 1) return { x: lines[0].x, mean: lines[0].y, low: null, high: null, count: 1 };
  const alike = lines.every(
    (line) => line.x.length === lines[0].x.length && line.x.every((x, i) => x === lines[0].x[i]),
  );
  let x = lines[0].x,
    values = lines.map((line) => line.y);
  if (!alike) {
    const from = Math.max(...lines.map((line) => line.x[0])),
      to = Math.min(...lines.map((line) => last(line.x)));
    x = [...new Set(lines.flatMap((line) => line.x))].filter((at) => at >= from && at <= to).sort((a, b) => a - b);
    values = lines.map((line) => x.map((at) => between(line, at)));
  }
  const each = (pick) => x.map((_, i) => pick(values.map((line) => line[i])));
  return {
    x,
    mean: each((some) => spread(some).mean),
    low: each((some) => Math.min(...some)),
    high: each((some) => Math.max(...some)),
    count: lines.length,
  };
}
