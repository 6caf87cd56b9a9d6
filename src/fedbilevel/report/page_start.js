// ---- the whole page -------------------------------------------------------------------------------------------------

const PARTS = [
  tasks,
  heading,
  curves,
  verdict,
  seeds,
  status,
  cards,
  targets,
  finals,
  studies,
  findings,
  partition,
  diagnostics,
  ledger,
  configuration,
];

/* Some parts of the page, or all. */
function render(...parts) {
  for (const part of parts.length ? parts : PARTS) {
    try {
      part();
    } catch (error) {
      // one damaged record must not hide the others
      console.error(error);
      const note = document.createElement("p");
      note.className = "note";
      note.textContent = `The part "${part.name}" cannot be drawn: ${error.message}.`;
      document.querySelector("main").prepend(note);
    }
  }
  document.documentElement.dataset.drawn = String(Number(document.documentElement.dataset.drawn ?? 0) + 1);
}

const changes = (id, change, ...parts) =>
  by(id).addEventListener("change", (event) => {
    change(event.target);
    render(...parts);
  });
changes(
  "metric",
  (select) => {
    if (!state.typed && !content.target) state.target = { metric: select.value, value: null };
    state.metric = select.value;
  },
  curves,
  verdict,
  seeds,
  cards,
  targets,
);
changes("task", (select) => {
  Object.assign(state, { group: select.value, target: null, typed: false, run: {} });
});
changes(
  "log",
  (box) => {
    state.log = box.checked;
  },
  curves,
);
changes(
  "target-metric",
  (select) => {
    state.target = {
      metric: select.value,
      value: content.target?.metric === select.value ? number(content.target.value) : null,
    };
    state.typed = false;
  },
  targets,
);
by("target-value").addEventListener("input", (event) => {
  state.typed = true;
  state.target.value = event.target.value === "" ? NaN : Number(event.target.value);
  targets();
});
changes(
  "partition-role",
  (select) => {
    state.role = select.value;
  },
  partition,
);
changes(
  "ledger-column",
  (select) => {
    state.column = select.value;
  },
  ledger,
);
for (const [id, part] of [
  ["partition-run", partition],
  ["findings-run", findings],
  ["ledger-run", ledger],
])
  changes(
    id,
    (select) => {
      state.run[id] = Number(select.value);
    },
    part,
  );

const dark = window.matchMedia("(prefers-color-scheme: dark)");
const theme = () => document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light");
const nameTheme = () => {
  by("theme-name").textContent = theme() === "dark" ? "Light" : "Dark";
};
by("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = theme() === "dark" ? "light" : "dark";
  nameTheme();
  render();
});
dark.addEventListener("change", () => {
  nameTheme();
  render();
});
nameTheme();

let wide = narrow();
window.addEventListener("resize", () => {
  if (wide !== narrow()) {
    wide = narrow();
    render();
  }
});

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
