// Draws the page and handles user input.

function drawHead() {
  byId("run").replaceChildren(visible(head.run));
  document.title = `${plainVisible(head.run)} · rollouts`;
  const recorded = head.recorded_at ? `, recorded ${head.recorded_at}` : "";
  byId("where").replaceChildren(visible(`variant ${head.variant}${recorded} · ${head.path}`));
  const facts = head.facts.map(([name, value]) =>
    el("div", {}, el("dt", {}, visible(name)), el("dd", {}, visible(value))));
  byId("facts").replaceChildren(...facts);
  byId("made").textContent = `Created by ${head.made_by} at ${head.made_at}. This page does not load anything.`;
  if (head.live) byId("made").textContent = `Served by ${head.made_by} on this machine, read-only.`;
}

function drawNotes(problems, left) {
  const broken = inOrder().filter((entry) => entry.broken).map((entry) => `${entryName(entry)}: ${entry.broken}`);
  drawNotice("problems", [...problems, ...broken]);
  drawNotice("left-out", left);
}

function drawAll() {
  drawCharts();
  drawTable();
  drawSources();
  drawGroups();
}

function goToCard(by) {
  const all = [...byId("list").children];
  const at = all.indexOf(document.activeElement?.closest?.(".card"));
  let next = all[at < 0 ? (by > 0 ? 0 : all.length - 1) : at + by];
  if (!next && by > 0 && !byId("more").hidden) {
    showMore();
    next = byId("list").children[at + 1];
  }
  next?.focus();
  next?.scrollIntoView({ block: "start" });
}

function keyPressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
  const typing = event.target.matches?.("input:not([type=checkbox]), select, textarea");
  if (event.key === "Escape" && event.target.id === "f-text") {
    byId("f-text").value = "";
    changed();
    return;
  }
  const actions = {
    "/": () => byId("f-text").focus(),
    j: () => goToCard(1),
    k: () => goToCard(-1),
    t: nextTheme,
    "?": () => byId("help").showModal(),
  };
  if (typing || !Object.hasOwn(actions, event.key)) return;
  event.preventDefault();
  actions[event.key]();
}

function listen() {
  const form = byId("filters");
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(changed));
  form.addEventListener("change", changed);
  form.addEventListener("input", debounce(changed, 150));
  byId("more").addEventListener("click", showMore);
  byId("all-steps").addEventListener("click", () => {
    showAllRows = true;
    drawTable();
  });
  byId("theme").addEventListener("click", nextTheme);
  byId("help-button").addEventListener("click", () => byId("help").showModal());
  byId("help-close").addEventListener("click", () => byId("help").close());
  document.addEventListener("keydown", keyPressed);
}

setTheme(readTheme());
drawHead();
drawMismatch();
drawLegend();
data.entries.forEach(addEntry);
loadFilters();
applyDisplayOptions();
listen();
setCharts(trends());
redrawOnResize();
drawAll();
drawNotes(head.problems, head.left_out);
if (head.live) poll();
document.documentElement.dataset.ready = "yes";
