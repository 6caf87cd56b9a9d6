// ---- configuration --------------------------------------------------------------------------------------------------

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
  setTimeout(() => {
    button.textContent = "Copy";
  }, 1500);
}

let drawnConfiguration = "";
function configuration() {
  const written = [
    ...records.runs.map((run, i) => ({
      name: runName(i, records),
      path: run.path,
      config: run.config,
      versions: run.versions,
      state: run.state,
      planned: run.planned,
    })),
    ...records.studies.map((study) => ({
      name: study.kind,
      path: study.path,
      config: study.config,
      versions: study.versions,
    })),
  ];
  if (!show("configuration", written.length)) return;
  const key = JSON.stringify(written);
  if (key === drawnConfiguration) return;
  drawnConfiguration = key;
  const opened = new Set(
    [...by("configurations").querySelectorAll("details[open] summary")].map((one) => one.textContent),
  );
  const kinds = [...new Map(written.map((one) => [JSON.stringify(one.versions), one.versions])).values()],
    names = [...new Set(kinds.flatMap((one) => Object.keys(one)))];
  by("versions").replaceChildren(
    table(
      kinds.length > 1 ? "Versions that wrote these records" : "Versions that wrote this record",
      names,
      kinds.map((one) => names.map((name) => element("td", {}, String(one[name] ?? "–")))),
    ),
  );
  const texts = new Map();
  for (const one of written) texts.set(one.config.text, [...(texts.get(one.config.text) ?? []), one]);
  by("configurations").replaceChildren(
    ...[...texts.entries()].map(([text, some]) => {
      const button = element("button", { type: "button" }, "Copy");
      button.addEventListener("click", () => copy(text, button));
      const title =
        some.length > 3
          ? `${some[0].config.kind} of ${some.length} runs in ${some[0].path}`
          : some.map((one) => one.name).join("; ");
      const made = element(
        "details",
        { open: texts.size === 1 || opened.has(title) },
        element("summary", {}, title),
        element(
          "div",
          { class: "body" },
          element("div", { class: "head" }, element("span", {}, `${some[0].config.kind} in ${some[0].path}`), button),
          element("pre", { tabindex: "0" }, text),
        ),
      );
      return made;
    }),
  );
}

// ---- while a run continues ------------------------------------------------------------------------------------------

let asked = null;
let lost = false;
function status() {
  const going = records.runs.filter((run) => run.state === "going"),
    stopped = records.runs.filter((run) => run.state === "stopped"),
    wrong = records.runs.filter(isLost);
  const alone = records.runs.length === 1;
  const who = (run) => (alone ? "" : runName(records.runs.indexOf(run), records));
  const told = (sentences) =>
    [
      ...sentences.slice(0, MOST_TOLD),
      ...(sentences.length > MOST_TOLD ? [`And ${sentences.length - MOST_TOLD} more.`] : []),
    ].join(" ");
  const ended = (text) => (/[.!?]$/.test(text) ? text : `${text}.`);
  const failures = told(wrong.map((run) => ended(failure(run, who(run)))));
  /* Every run by itself: a running one must not hide a dead one. */
  const silences = () =>
    told(
      going
        .map((run) => [run, Math.floor((Date.now() / 1000 - (run.written ?? 0)) / 60)])
        .filter(([, minutes]) => minutes >= SILENT)
        .map(
          ([run, minutes]) =>
            `Nothing new${alone ? "" : ` from ${who(run)}`} for ${minutes} min: it computes, or its process has ended` +
            `${run.resumable ? ` (then: fedbilevel resume ${run.path})` : ""}.`,
        ),
    );
  const place = by("status");
  place.className = "status";
  const where = (run) => {
    const name = run.planned.rounds ? "rounds" : "iteration",
      done = last(column(run, name)) || 0;
    const end = run.planned[name] ? ` of ${run.planned[name]}` : "";
    return `${run.algorithm}: ${name === "rounds" ? `${done}${end} rounds` : `outer iteration ${done}${end}`}`;
  };
  let text = "";
  if (lost) {
    text = `The connection to fedbilevel watch is lost; this is what was known at ${asked}.`;
    place.classList.add("lost");
  } else if (LIVE && records.over) {
    text =
      failures ||
      (stopped.length
        ? `${alone ? "The run was" : "Runs were"} stopped (${stopped.map(where).join("; ")}).`
        : records.runs.length > 1
          ? "The runs have finished."
          : "The run has finished.");
    place.classList.add("over");
  } else if (going.length) {
    const first = going.some((run) => (run.columns.iteration ?? []).length);
    text = `${LIVE ? "Running" : "Not finished when this was written"}: ${going.map(where).join("; ")}.`;
    text = [text, LIVE && !first ? "No measurement yet." : "", LIVE ? silences() : "", failures]
      .filter(Boolean)
      .join(" ");
  } else if (stopped.length || wrong.length)
    text = [stopped.length ? `Stopped before its end: ${stopped.map(where).join("; ")}.` : "", failures]
      .filter(Boolean)
      .join(" ");
  else if (LIVE) text = "These are the records so far; more will appear here.";
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
    const changed = same(newer) !== same(records) || lost;
    [records, lost, asked] = [newer, false, new Date().toLocaleTimeString()];
    if (changed) render();
    else status();
  } catch {
    if (!lost) {
      lost = true;
      status();
    }
  }
  if (!(records.over && !lost)) setTimeout(ask, EVERY);
}
