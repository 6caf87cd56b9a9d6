"use strict";
(() => {
  const start = JSON.parse(document.getElementById("data").textContent);
  const token = start.token;
  const at = (id) => document.getElementById(id);
  let shown = "", said = "", failed = false;

  // every text goes in as text, never as markup
  function make(kind, text, parts = {}) {
    const made = document.createElement(kind);
    if (text !== undefined) made.textContent = text;
    return Object.assign(made, parts);
  }

  function facts(place, rows) {
    place.replaceChildren(...rows.flatMap(([heading, lines]) => {
      const body = make("div");
      body.append(...lines.map((line) => make("p", line)));
      return [make("h3", heading), body];
    }));
  }

  function button(text, kind, asked) {
    const made = make("button", text, { type: "button", className: kind });
    made.addEventListener("click", () => act(asked));
    return made;
  }

  function request(one) {
    const card = make("article", undefined, { className: "request" });
    const list = make("div", undefined, { className: "facts" });
    const actions = make("p", undefined, { className: "actions" });
    card.dataset.digest = one.digest;
    facts(list, one.rows);
    actions.append(
      button("Approve", "main", { action: "approve", digest: one.digest }),
      button("Refuse", "away", { action: "refuse", digest: one.digest }),
    );
    card.append(make("h3", `${one.run}, sent by ${one.who}`), list, actions);
    return card;
  }

  function draw(data) {
    at("name").textContent = data.name;
    at("kit").textContent = `Site of a federation, ${data.kit}`;
    at("pause").textContent = data.paused ? "Resume" : "Pause";
    at("pause").className = data.paused ? "main" : "";
    at("pause").hidden = false;
    at("pause").onclick = () => act({ action: data.paused ? "unpause" : "pause" });
    at("leave").textContent = `Leave ${data.run}`;
    at("leave").className = "away";
    at("leave").hidden = !data.run;
    at("leave").onclick = () => {  // ask for confirmation, because no button undoes it
      at("leave").textContent = `Leave ${data.run}: press again to confirm`;
      at("leave").onclick = () => act({ action: "leave", run: data.run });
    };
    at("requests").hidden = data.pending.length === 0;
    at("pending").replaceChildren(...data.pending.map(request));
    facts(at("rows"), data.rows);
    const [done, all] = data.progress;
    at("progress").hidden = !all;
    at("progress").max = all || 1;
    if (done !== null) at("progress").value = done;  // otherwise the last message names no outer iteration
    document.documentElement.dataset.drawn = "yes";
  }

  function status(data) {
    const number = data.pending.length, waits = number === 1 ? "A plan waits" : `${number} plans wait`;
    const state = data.paused ? "This site is paused: it answers nothing."
      : data.trouble ? data.trouble
      : number ? `${waits} for your approval.` : "This site is up.";
    at("status").textContent = said || state;
    at("status").className = `status ${failed || data.trouble ? "lost" : data.paused ? "" : "over"}`;
  }

  // redraw only after a change, so that a button stays under the pointer
  function update(data, acted) {
    const text = JSON.stringify(data);
    if (text !== shown) {
      draw(data);
      if (!acted) [said, failed] = ["", false];
    }
    shown = text;
    status(data);
  }

  async function look(acted) {
    try {
      const answer = await fetch("/data.json", { headers: { "X-Token": token }, cache: "no-store" });
      if (!answer.ok) throw new Error(answer.status);
      update(await answer.json(), acted);
    } catch {
      at("status").textContent = "This page has lost its server: start `fedbilevel federation watch --page` again.";
      at("status").className = "status lost";
    }
  }

  async function act(asked) {
    for (const one of document.querySelectorAll("button")) one.disabled = true;
    try {
      const answer = await fetch("/act", {
        method: "POST", headers: { "X-Token": token, "Content-Type": "application/json" }, body: JSON.stringify(asked),
      });
      const told = await answer.json();
      failed = !answer.ok;
      said = failed ? told.error : told.said;
    } catch {
      failed = true;
      said = "The action did not arrive.";
    }
    for (const one of document.querySelectorAll("button")) one.disabled = false;
    await look(true);
  }

  delete start.token;
  update(start, false);
  setInterval(() => look(false), 2000);
})();
