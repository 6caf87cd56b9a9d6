// ---- explanations ---------------------------------------------------------------------------------------------------

// words on the page for terms that `columns.TERMS` names otherwise
const TERM_OF = {
  MB: "megabytes",
  "oracle calls": "calls",
  iterations: "iteration",
  "outer iterations": "iteration",
  "communication rounds": "rounds",
};

/* The sentence that explains a word, or undefined. Own properties only: a column may be named "constructor". */
function meaning(text) {
  const known = [text, String(text).replaceAll(" ", "_"), TERM_OF[text]].find((name) =>
    Object.hasOwn(records.terms, name),
  );
  return known === undefined ? undefined : records.terms[known];
}

/* The word, with an explanation for mouse and keyboard where there is one. */
function explained(text) {
  const sentence = meaning(text);
  return sentence ? element("span", { class: "term", tabindex: "0", "data-term": sentence }, text) : text;
}

let pointed = null;

function showTip(node) {
  const tip = by("tip");
  if (pointed) pointed.removeAttribute("aria-describedby");
  pointed = node;
  tip.hidden = !node;
  if (!node) return;
  tip.textContent = node.dataset.term;
  node.setAttribute("aria-describedby", "tip");
  const at = node.getBoundingClientRect();
  const left = Math.min(at.left, document.documentElement.clientWidth - tip.offsetWidth - 8);
  tip.style.left = `${Math.max(8, left) + window.scrollX}px`;
  tip.style.top = `${at.bottom + window.scrollY + 4}px`;
}

for (const event of ["mouseover", "focusin"])
  document.addEventListener(event, ({ target }) => {
    const node = target.closest?.("[data-term]");
    if (node) showTip(node);
    else if (event === "mouseover" && pointed && !target.closest?.("#tip") && document.activeElement !== pointed)
      showTip(null);
  });
document.addEventListener("focusout", () => showTip(null));
document.addEventListener("keydown", ({ key }) => {
  if (key === "Escape") showTip(null);
});
