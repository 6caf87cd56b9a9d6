// ---- tasks ----------------------------------------------------------------------------------------------------------

const ALL = "all";
const UNRECORDED = "task not recorded";
const isMixed = () => records.groups.length > 1 && state.group === ALL;

/* The content with the runs of one task only, numbered anew. */
function ofTask(group) {
  const curves = records.curves.filter((curve) => curve.group === group);
  const numbers = curves.flatMap((curve) => curve.runs).sort((a, b) => a - b);
  const runs = numbers.map((number) => records.runs[number]);
  const renumbered = (some) => some.filter((one) => numbers.includes(one)).map((one) => numbers.indexOf(one));
  const measured = (name) => runs.some((run) => Object.hasOwn(run.columns, name));
  const partitions = records.partitions.map((one) => ({ ...one, runs: renumbered(one.runs) }));
  return {
    ...records,
    runs,
    curves: curves.map((curve) => ({ ...curve, name: curve.short, runs: renumbered(curve.runs) })),
    partitions: partitions.filter((one) => one.runs.length),
    metrics: records.metrics.filter(measured),
    diagnostics: records.diagnostics.filter(measured),
    target: records.target && measured(records.target.metric) ? records.target : null,
  };
}

function tasks() {
  const { groups } = records;
  content = records;
  if (!show("tasks", groups.length > 1)) return;
  const entries = [...groups.map((one, i) => [i, words(one.name)]), [ALL, "all tasks together"]];
  state.group = options("task", entries, state.group);
  if (!isMixed()) content = ofTask(Number(state.group));
  const many = content.runs.length === 1 ? "1 run" : `${content.runs.length} runs`;
  by("tasks-note").textContent = isMixed()
    ? `The ${records.runs.length} runs below solve ${groups.length} tasks, so their figures are not comparable.`
    : `These records hold runs of ${groups.length} tasks, whose figures are not comparable. ` +
      `Below: ${words(groups[Number(state.group)].name)}, ${many} of ${records.runs.length}.`;
}

// ---- the best run ---------------------------------------------------------------------------------------------------

/* Curves with a finite last value of the metric, the best first. Without a known direction: the highest first. */
function ranked(metric) {
  const found = content.curves.map((curve) => {
    const runs = whole(curve).filter((run) => Number.isFinite(last(column(run, metric))));
    return { curve, runs, ...(runs.length ? spread(runs.map((run) => last(column(run, metric)))) : { count: 0 }) };
  });
  const sign = falls(metric) ? 1 : -1;
  return found.filter((one) => one.count).sort((a, b) => sign * (a.mean - b.mean));
}

const withSpread = ({ mean, deviation, count }) =>
  count > 1 ? `${shown(mean)} ± ${shownDeviation(deviation)} (${count} seeds)` : `${shown(mean)} (1 run)`;

/* Whether the difference of two means exceeds the spread over seeds, in a sentence. */
function judged(best, next) {
  const gap = Math.abs(best.mean - next.mean);
  if (best.count > 1 && next.count > 1)
    return gap <= best.deviation + next.deviation
      ? "The difference is within the spread: the ranges mean ± standard deviation overlap, " +
          "so these seeds do not show which is better."
      : "The difference exceeds the spread: the ranges mean ± standard deviation do not overlap.";
  if (best.count === 1 && next.count === 1) return "Each has one seed, so the spread is unknown.";
  return `${(best.count === 1 ? best : next).curve.name} has one seed, so its spread is unknown.`;
}

/* Costs decide too, so unequal ones are named. */
function unequal(best, next) {
  const rounds = [best, next].map((one) => spread(one.runs.map((run) => last(column(run, "rounds")))).mean);
  if (rounds.some(Number.isNaN) || rounds[0] === rounds[1]) return "";
  return `They took ${shown(rounds[0])} and ${shown(rounds[1])} rounds.`;
}

function verdict() {
  const { metric } = state,
    found = metric ? ranked(metric) : [],
    place = by("verdict");
  if (!show("verdict", found.length || cleaning())) return;
  delete place.dataset.gap;
  const cleaned = cleaning();
  if (cleaned) return place.replaceChildren(...cleaned.sentences.map((text) => element("p", {}, text)));
  const ended = found.every((one) => one.runs.every((run) => run.state === "finished"));
  const figure = [`${ended ? "final" : "latest"} `, explained(words(metric))];
  const unknown = content.runs.some((run) => run.task === UNRECORDED)
    ? " Runs without a record do not say which task they solve."
    : "";
  const say = (...parts) => place.replaceChildren(...parts, unknown);
  const [best, next] = found;
  if (isMixed()) return say("Runs of different tasks are shown together, so none is called the best: choose one task.");
  if (!next) return say(`${label(best.curve)}: `, ...figure, ` ${withSpread(best)}.`);
  if (!falls(metric) && !content.rises.includes(metric)) {
    const lowest = last(found);
    return say(
      "No direction of ",
      explained(words(metric)),
      " is known to be better. Highest: ",
      `${label(best.curve)}, ${withSpread(best)}. Lowest: ${label(lowest.curve)}, ${withSpread(lowest)}.`,
    );
  }
  const gap = Math.abs(best.mean - next.mean);
  place.dataset.gap = String(gap);
  if (gap === 0)
    return say(`Equal in `, ...figure, `: ${label(best.curve)} and ${label(next.curve)}, ${withSpread(best)}.`);
  const share = next.mean === 0 ? "" : ` (${((100 * gap) / Math.abs(next.mean)).toPrecision(2)} %)`;
  say(
    "Best ",
    ...figure,
    ": ",
    element("strong", {}, label(best.curve)),
    ` with ${withSpread(best)}, `,
    `${shownDeviation(gap)}${share} ${falls(metric) ? "below" : "above"} `,
    `${label(next.curve)} with ${withSpread(next)}. `,
    [judged(best, next), unequal(best, next)].filter(Boolean).join(" "),
  );
}

// ---- spread over seeds ----------------------------------------------------------------------------------------------

const FEWEST = 3; // seeds of a box plot

function seeds() {
  const { metric } = state;
  const found =
    metric && !isMixed()
      ? content.curves
          .map((curve, i) => ({
            curve,
            i,
            values: whole(curve)
              .map((run) => last(column(run, metric)))
              .filter(Number.isFinite),
          }))
          .filter((one) => one.values.length)
      : [];
  if (
    !show(
      "seeds",
      found.some((one) => one.values.length >= FEWEST),
    )
  )
    return;
  const traces = found.map(({ curve, i, values }, at) => {
    const common = {
      name: harmless(curve.name),
      x: values,
      y: values.map(() => at),
      orientation: "h",
      showlegend: false,
      marker: { color: colour(i), size: 6, opacity: 0.75 },
      hovertemplate: "%{x}<extra></extra>",
      meta: { curve: i },
    };
    return values.length >= FEWEST
      ? { ...common, type: "box", boxpoints: "all", pointpos: 0, jitter: 0.4, line: { color: colour(i), width: 1.5 } }
      : { ...common, type: "scatter", mode: "markers" };
  });
  draw("seeds-plot", traces, {
    title: { x: words(metric) },
    height: 110 + 56 * found.length,
    margin: { l: 12 },
    more: {
      yaxis: {
        tickvals: found.map((_, at) => at),
        ticktext: found.map((one) => shortName(one.curve)),
        range: [found.length - 0.5, -0.5],
        showgrid: false,
        zeroline: false,
      },
    },
    alt:
      `${words(metric)} at the last measurement of every run, ` +
      `one row for each of: ${content.curves.map(label).join("; ")}.`,
  });
  by("seeds-note").textContent =
    "Each dot is the last measurement of one run. A box holds the middle half of the seeds; " +
    `its line is the median. Curves with fewer than ${FEWEST} seeds have dots only.`;
}
