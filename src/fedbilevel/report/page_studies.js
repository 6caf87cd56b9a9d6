// ---- studies --------------------------------------------------------------------------------------------------------

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
  const made = element(
    "article",
    { class: "card" },
    element("h3", {}, name),
    put(element("p", { class: "big" }), number(value)),
    element("p", { class: "of" }, note),
  );
  if (mark) made.style.setProperty("--mark", mark);
  return made;
}

function influence(study, place) {
  place.append(
    element(
      "h2",
      {},
      `Influence of instances: ${[study.task.data, study.task.model, study.method].filter(Boolean).join(", ")}`,
    ),
  );
  const scores = study.scores ?? {};
  const figures = [
    ["R²", scores.r2, "of predicted against actual changes"],
    ["F1", scores.f1, "of finding harmful instances"],
    ["Pearson", scores.pearson, "correlation of predicted and actual"],
    ["Validation accuracy", study.val_accuracy, "of the trained model"],
    ["Residual", study.residual, "of the linear system behind the prediction"],
  ].filter(([, value]) => value !== null && value !== undefined);
  place.append(
    element(
      "div",
      { class: "cards" },
      ...figures.map(([name, value, note], i) => figureCard(name, value, note, colour(i))),
    ),
  );
  if (study.removed.length) {
    place.append(
      element("h3", {}, "Predicted and actual change by removal"),
      element(
        "p",
        { class: "note" },
        "Change of the validation loss, summed over clients, when one training instance is removed and the model is " +
          `trained again: ${study.removed.length} removals of the largest predictions. On the line it is exact.`,
      ),
    );
    const actual = study.removed.map((one) => number(one.actual)),
      predicted = study.removed.map((one) => number(one.prediction)),
      both = [...actual, ...predicted].filter(Number.isFinite),
      ends = [Math.min(...both), Math.max(...both)];
    const group = (wrong) => study.removed.filter((one) => Boolean(one.wrong) === wrong);
    const dots = [false, true]
      .filter((wrong) => group(wrong).length)
      .map((wrong) => ({
        type: "scatter",
        mode: "markers",
        name: wrong ? "label made wrong" : "label as it was",
        x: group(wrong).map((one) => number(one.actual)),
        y: group(wrong).map((one) => number(one.prediction)),
        marker: { color: tinted(colour(wrong ? 1 : 0), 0.75), size: 9, symbol: wrong ? "x" : "circle" },
        customdata: group(wrong).map((one) => [one.client, one.sample, harmless(one.label)]),
        hovertemplate:
          "client %{customdata[0]}, sample %{customdata[1]}, label %{customdata[2]}<br>" +
          "actual %{x:.4g}, predicted %{y:.4g}<extra></extra>",
        meta: { wrong },
      }));
    const div = plotIn(place);
    div.id = "removals-plot";
    draw(
      div,
      [
        {
          type: "scatter",
          mode: "lines",
          x: ends,
          y: ends,
          line: { color: tone("soft"), width: 1, dash: "dot" },
          hoverinfo: "skip",
          showlegend: false,
          meta: { part: "diagonal" },
        },
        ...dots,
      ],
      {
        title: { x: "actual change", y: "predicted change" },
        height: narrow() ? 360 : 460,
        more: { showlegend: dots.length > 1 },
        alt: `Predicted against actual changes of ${study.removed.length} removals; R2 is ${scores.r2}.`,
      },
    );
  }
  for (const [kind, what, rows] of [
    ["harmful", "Most harmful instances: removal lowers the loss", study.harmful],
    ["helpful", "Most helpful instances: removal raises the loss", study.helpful],
  ]) {
    if (!rows.length) continue;
    const box = element(
      "div",
      { class: "box", id: `instances-${kind}` },
      table(
        `${rows.length} of ${study.num_instances} instances, by the predicted change of the validation loss, ` +
          "summed over clients, on their removal",
        ["rank", "client", "sample", "label", "made wrong", "predicted change", "actual change"],
        rows.map((one, i) => [
          element("th", { scope: "row" }, String(i + 1)),
          cell(number(one.client)),
          cell(number(one.sample)),
          anyCell(one.label),
          anyCell(Boolean(one.wrong)),
          cell(number(one.prediction)),
          one.actual === null ? element("td", { class: "none" }, "not tried") : cell(number(one.actual)),
        ]),
      ),
    );
    place.append(element("h3", {}, what), box);
  }
  for (const one of study.findings ?? []) finding(one, null, place);
  const facts = [
    ["total validation loss", study.loss],
    ["|mean g_y| of the trained model", study.lower_gradient],
    ["peers' u differ by", study.disagreement],
    ["noise of training", study.noise],
    ...Object.entries(study.cost ?? {}).map(([name, value]) => [`prediction: ${words(name)}`, value]),
    ...Object.entries(study.seconds ?? {}).map(([name, value]) => [`seconds of ${words(name)}`, value]),
  ].filter(([, value]) => value !== null && value !== undefined);
  place.append(
    element("h3", {}, "What it cost"),
    element(
      "div",
      { class: "box" },
      table(
        "Cost of the prediction, summed over clients, and seconds of every step",
        ["", "value"],
        facts.map(([name, value]) => [rowHead(name), cell(number(value))]),
      ),
    ),
  );
}

function personalisation(study, place) {
  const size = study.task.num_clients ? `${study.task.num_clients} clients` : null;
  const methods = [...new Set(study.outcomes.map((one) => one.method))],
    networks = [...new Set(study.outcomes.map((one) => one.network))];
  const of = (method, network) => study.outcomes.filter((one) => one.method === method && one.network === network);
  place.append(
    element("h2", {}, `Personalisation: ${[study.task.data, study.task.model, size].filter(Boolean).join(", ")}`),
  );
  const entries = methods.flatMap((method, i) =>
    networks.filter((network) => of(method, network).length).map((network) => [method, network, i]),
  );
  const best = entries.map(([method, network, i]) => ({
    method,
    network,
    i,
    found: spread(of(method, network).map((one) => number(one.test_accuracy))),
  }));
  place.append(
    element(
      "div",
      { class: "cards" },
      ...methods.map((method, i) => {
        const mine = best.filter((one) => one.method === method).sort((a, b) => b.found.mean - a.found.mean)[0];
        return figureCard(method, mine.found.mean, `test accuracy, best on ${words(mine.network)}`, colour(i));
      }),
    ),
  );
  const columns = {
    test_accuracy: "test accuracy",
    bottom_decile: "bottom decile",
    validation_accuracy: "validation accuracy",
    rounds: "rounds",
    megabytes: "MB",
    seconds: "seconds",
  };
  const box = element(
    "div",
    { class: "box", id: "personalisation-table" },
    table(
      "At the best validation accuracy, mean ± standard deviation over repetitions",
      ["method", "network", "runs", ...Object.values(columns)],
      entries.map(([method, network, i]) => [
        rowHead(method, colour(i)),
        element("td", { class: "left" }, words(network)),
        cell(of(method, network).length),
        ...Object.keys(columns).map((name) => spreadCell(of(method, network).map((one) => number(one[name])))),
      ]),
    ),
  );
  box.querySelectorAll("thead th")[1].className = "left";
  place.append(element("h3", {}, "Accuracy and cost"), box);
  if (!study.outcomes.some((one) => one.accuracies?.length)) return;
  place.append(
    element("h3", {}, "Test accuracy of every client"),
    element(
      "p",
      { class: "note" },
      "Each dot is a client, the box holds the middle half of them and the line in it is the median.",
    ),
  );
  const several = networks.length > 1,
    div = plotIn(place);
  div.id = "accuracies-plot";
  const traces = networks.map((network, k) => {
    const pairs = methods.flatMap((method) =>
      of(method, network).flatMap((one) => (one.accuracies ?? []).map((value) => [method, number(value)])),
    );
    return {
      type: "box",
      name: harmless(words(network)),
      x: pairs.map(([method]) => harmless(method)),
      y: pairs.map(([, value]) => value),
      boxpoints: "all",
      pointpos: 0,
      jitter: 0.5,
      marker: { color: colour(k), size: 3, opacity: 0.6 },
      line: { width: 1.5, color: colour(k) },
      meta: { network },
    };
  });
  draw(div, traces, {
    title: { y: "test accuracy" },
    height: 420,
    more: { boxmode: "group", showlegend: several, xaxis: { type: "category" } },
    alt: `Test accuracies of single clients, by method${several ? " and network" : ""}.`,
  });
}
