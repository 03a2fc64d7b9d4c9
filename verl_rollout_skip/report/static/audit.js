// Draws an audit: the figures that differ between two trainings, and their curves on top of each other.

const INITIAL_CHARTS = 60;
const HEADINGS = [
  ["Stage", "left"],
  ["Figure", "left"],
  ["First differing step", ""],
  ["Steps that differ", ""],
  ["Largest difference", ""],
  ["Relative", ""],
];

const data = JSON.parse(byId("data").textContent);
byId("data").remove();
const head = data.head;
let pair = data.pairs[0];
let entries = [];
let charted = 0;

const inOrder = () => entries;
const entryName = (entry) => `step ${entry.step}`;

function precise(value) {
  if (!isNumber(value)) return format(value);
  if (value !== 0 && (Math.abs(value) < 1e-4 || Math.abs(value) >= 1e9)) return value.toExponential(3);
  return Number(value.toPrecision(8)).toLocaleString("en-US", { maximumFractionDigits: 10 });
}

// The size of a difference: three digits say enough.
const size = (value) => (isNumber(value) ? precise(Number(value.toPrecision(3))) : format(value));

// Shorter than in the values, because a tick has little room.
function tickText(value) {
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6)) return value.toExponential(1);
  return Number(value.toPrecision(5)).toString();
}

// Numbers of which the difference is finite; other values appear in no curve.
const drawable = (value) => (isNumber(value) && Math.abs(value) < 1e300 ? value : null);

function drawHead() {
  byId("run").replaceChildren(visible(head.title));
  document.title = `${plainVisible(head.title)} · audit`;
  byId("where").replaceChildren(visible(head.where));
  byId("made").textContent = `Created by ${head.made_by} at ${head.made_at}. This page does not load anything.`;
  byId("pair-label").hidden = data.pairs.length < 2;
  const options = data.pairs.map((one, number) => el("option", { value: number }, `${plainVisible(one.b.name)}: ${one.verdict}`));
  byId("pair").replaceChildren(...options);
}

function drawPair() {
  byId("verdict").replaceChildren(visible(pair.summary));
  byId("verdict").className = `verdict ${pair.verdict === "different" ? "bad" : "good"}`;
  const facts = [["a", pair.a.text], ["b", pair.b.text]];
  byId("facts").replaceChildren(...facts.map(([name, value]) =>
    el("div", {}, el("dt", {}, visible(name)), el("dd", {}, visible(value)))));
  drawNotice("notes", pair.notes);
  byId("legend-curves").replaceChildren(
    el("span", { class: "swatch" }), visible(`a: ${pair.a.name}`), " ",
    el("span", { class: "swatch other" }), visible(`b: ${pair.b.name}`),
    ". Hover over a chart or use ← and → for the exact values. A dotted line marks the first step that differs.",
  );
  const stages = [...new Set(pair.figures.map((figure) => figure.stage))];
  const any = el("option", { value: "", text: "any" });
  byId("f-stage").replaceChildren(any, ...stages.map((stage) => el("option", { value: stage, text: stage })));
  byId("f-which").value = pair.figures.some((figure) => figure.differing) ? "differing" : "all";
  entries = pair.steps.map((step, index) => ({ step, statistics: statisticsOf(index) }));
  drawFigures();
}

// The values of all figures at one step, by the keys that the lines of the charts use.
function statisticsOf(index) {
  const found = {};
  pair.figures.forEach((figure, number) => {
    const [a, b] = [figure.a?.[index] ?? null, figure.b?.[index] ?? null];
    found[`a${number}`] = drawable(a);
    found[`b${number}`] = drawable(b);
    found[`d${number}`] = isNumber(a) && isNumber(b) ? drawable(b - a) : null;
  });
  return found;
}

function shownFigures() {
  const [name, stage] = [byId("f-name").value.trim().toLowerCase(), byId("f-stage").value];
  const all = byId("f-which").value === "all";
  return pair.figures
    .map((figure, number) => ({ ...figure, number }))
    .filter((figure) => (all || figure.differing) && (!stage || figure.stage === stage))
    .filter((figure) => figure.name.toLowerCase().includes(name));
}

function drawFigures() {
  const shown = shownFigures();
  const differing = pair.figures.filter((figure) => figure.differing).length;
  byId("count").textContent =
    `${format(differing)} of ${format(pair.figures.length)} figures differ; ${format(shown.length)} are shown, in the order of the data flow.`;
  const heading = el("tr", {}, ...HEADINGS.map(([text, side]) => el("th", { scope: "col", class: side, text })));
  byId("figures").replaceChildren(el("thead", {}, heading), el("tbody", {}, ...shown.map(figureRow)));
  charted = 0;
  setCharts([]);
  moreCharts();
}

function figureRow(figure) {
  const steps = figure.differing ? `${format(figure.differing)} of ${format(figure.compared)}` : figure.compared ? "none" : "–";
  return el("tr", {},
    el("td", { class: "left", text: figure.stage }),
    el("td", { class: "left" }, visible(figure.name)),
    el("td", { text: format(figure.first_step) }),
    el("td", { text: steps }),
    el("td", { text: figure.differing ? size(figure.max_absolute) : "–" }),
    el("td", { text: figure.differing ? size(figure.max_relative) : "–" }),
  );
}

const withCurve = () => shownFigures().filter((figure) => figure.a || figure.b);

function moreCharts() {
  const all = withCurve();
  charted = Math.min(all.length, charted + INITIAL_CHARTS);
  setCharts(all.slice(0, charted).map(chartOf));
  drawCharts();
  const button = byId("more-charts");
  button.hidden = charted === all.length;
  button.textContent = `Show more curves (${format(all.length - charted)} left)`;
}

function chartOf(figure) {
  const a = [`a${figure.number}`, "a", ""];
  const b = [`b${figure.number}`, "b", "other"];
  const both = figure.a && figure.b ? [a, b] : figure.a ? [a] : [b];
  const difference = byId("f-curves").value === "difference";
  return {
    key: figure.name,
    title: plainVisible(figure.name),
    lines: difference ? [[`d${figure.number}`, "b − a", ""]] : both,
    formatValue: precise,
    formatTick: tickText,
    markedStep: figure.first_step,
    note: chartNote(figure),
  };
}

function chartNote(figure) {
  if (!figure.a || !figure.b) return `only in ${figure.a ? "a" : "b"}`;
  const what = figure.tensor ? "mean of the tensor; " : "";
  if (!figure.compared) return `${what}not compared`;
  if (!figure.differing) return `${what}equal in all compared steps`;
  const most = isNumber(figure.max_absolute) ? `; the largest difference is ${size(figure.max_absolute)}` : "";
  return `${what}first differs in step ${format(figure.first_step)}${most}`;
}

function listen() {
  byId("pair").addEventListener("change", () => {
    pair = data.pairs[Number(byId("pair").value)];
    drawPair();
  });
  for (const form of document.querySelectorAll("form")) form.addEventListener("submit", (event) => event.preventDefault());
  byId("filters").addEventListener("change", drawFigures);
  byId("f-name").addEventListener("input", debounce(drawFigures, 150));
  byId("more-charts").addEventListener("click", moreCharts);
  byId("theme").addEventListener("click", nextTheme);
}

setTheme(readTheme());
drawHead();
listen();
drawPair();
redrawOnResize();
document.documentElement.dataset.ready = "yes";
