// Small line charts over the rollout steps, drawn as SVG; all of them point at the same step.

const CHARTS = [
  { key: "score", title: "Score", lines: [["score", "mean"]], band: scoreBand, note: "band: ± standard deviation" },
  { key: "pass", title: "Pass rate", lines: [["pass_rate", "pass rate"]], form: percent, range: [0, 1], note: passNote },
  {
    key: "length",
    title: "Response length in tokens",
    lines: [["length_p50", "median"], ["length_max", "longest", "thin"], ["limit", "limit", "dashed"]],
    band: (found) => [found.length_p10, found.length_p90],
    note: "band: 10th to 90th percentile",
    from0: true,
    form: (value) => format(value, 0),
  },
  {
    key: "zero",
    title: "Groups without variance",
    lines: [["zero_variance", "all scores equal"]],
    form: percent,
    range: [0, 1],
    note: "of groups of two and more: nothing to learn from",
  },
  { key: "time", title: "Generation time", lines: [["generate_s", "seconds"]], form: seconds, from0: true },
  { key: "bytes", title: "Size on disk", lines: [["bytes", "bytes"]], form: bytes, from0: true },
];
const HEIGHT = 150;
const EDGE = { left: 52, right: 10, top: 8, bottom: 22 };

let pointed = null;
let drawn = [];

function scoreBand(found) {
  if (!isNumber(found.score) || !isNumber(found.score_std)) return [null, null];
  return [Math.max(found.score_min, found.score - found.score_std), Math.min(found.score_max, found.score + found.score_std)];
}

function passNote(shown) {
  const sources = [...new Set(shown.map((entry) => entry.statistics.pass_source))].filter((source) => source !== "none");
  return sources.length ? `a pass is: ${sources.join(" or ")}` : "neither acc nor scores were recorded";
}

function drawCharts() {
  const all = inOrder();
  pointed = pointed === null ? null : Math.min(pointed, all.length - 1);
  if (!drawn.length) {
    drawn = CHARTS.map((chart) => makeChart(chart));
    byId("charts").replaceChildren(...drawn.map(({ card }) => card));
    new ResizeObserver(later(drawCharts, 100)).observe(byId("charts"));
  }
  for (const chart of drawn) redraw(chart, all);
}

function makeChart(chart) {
  const value = el("span", { class: "value" });
  const note = el("p", { class: "quiet note" });
  const picture = svg("svg", { class: "chart", tabindex: 0, role: "img" });
  const card = el("figure", { class: "panel", "data-chart": chart.key },
    el("figcaption", {}, el("h3", { text: chart.title }), value), picture, note);
  const made = { ...chart, card, picture, value, noteLine: note, scale: null };
  picture.addEventListener("pointermove", (event) => point(nearest(made, event)));
  picture.addEventListener("pointerleave", () => point(null));
  picture.addEventListener("click", (event) => choose(nearest(made, event)));
  picture.addEventListener("focus", () => value.setAttribute("aria-live", "polite"));
  picture.addEventListener("blur", () => {
    value.removeAttribute("aria-live"); // or six charts would speak at once
    point(null);
  });
  picture.addEventListener("keydown", (event) => goAlong(event));
  return made;
}

function goAlong(event) {
  const last = entries.size - 1;
  const places = { ArrowLeft: (pointed ?? last + 1) - 1, ArrowRight: (pointed ?? -1) + 1, Home: 0, End: last };
  if (event.key in places) {
    point(Math.max(0, Math.min(last, places[event.key])));
    event.preventDefault();
  } else if (event.key === "Enter" && pointed !== null) {
    choose(pointed);
  }
}

function nearest(chart, event) {
  if (!chart.scale) return null;
  const box = chart.picture.getBoundingClientRect();
  return chart.scale.place(event.clientX - box.left);
}

function choose(place) {
  const entry = inOrder()[place];
  if (entry) showStep(entry);
}

function point(place) {
  pointed = place;
  const all = inOrder();
  for (const chart of drawn) showPointed(chart, all);
}

function redraw(chart, all) {
  const width = Math.max(220, chart.picture.clientWidth || chart.card.clientWidth - 24);
  const shown = all.filter((entry) => !entry.broken);
  chart.noteLine.textContent = typeof chart.note === "function" ? chart.note(shown) : chart.note ?? "";
  chart.picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  chart.picture.setAttribute("height", HEIGHT);
  const values = shown.flatMap((entry) => valuesOf(chart, entry)).filter(isNumber);
  const known = shown.some((entry) => isNumber(entry.statistics[chart.lines[0][0]]));
  chart.card.classList.toggle("empty", !known);
  chart.picture.replaceChildren();
  chart.scale = null;
  if (known) drawLines(chart, all, width, values);
  chart.picture.setAttribute("aria-label", describe(chart, shown, known));
  showPointed(chart, all);
}

const valuesOf = (chart, entry) => [
  ...chart.lines.map(([key]) => entry.statistics[key]),
  ...(chart.band ? chart.band(entry.statistics) : []),
];

function drawLines(chart, all, width, values) {
  let [low, high] = chart.range ?? [chart.from0 ? 0 : Math.min(...values), Math.max(...values)];
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const step = niceStep((high - low) / 3);
  low = chart.range ? low : Math.floor(low / step) * step;
  high = chart.range ? high : Math.ceil(high / step) * step;
  const inner = width - EDGE.left - EDGE.right;
  const gap = all.length > 1 ? inner / (all.length - 1) : 0;
  const x = (place) => EDGE.left + (all.length > 1 ? place * gap : inner / 2);
  const y = (value) => EDGE.top + (HEIGHT - EDGE.top - EDGE.bottom) * (1 - (value - low) / (high - low));
  const place = (at) => (gap ? Math.max(0, Math.min(all.length - 1, Math.round((at - EDGE.left) / gap))) : 0);
  chart.scale = { x, y, place };
  const form = chart.form ?? format;
  for (let tick = low; tick <= high + step / 1000; tick += chart.range ? (high - low) / 2 : step) {
    chart.picture.append(
      svg("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: y(tick), y2: y(tick) }),
      svg("text", { class: "tick", x: EDGE.left - 6, y: y(tick) + 4, "text-anchor": "end", text: form(round(tick)) }),
    );
  }
  drawSteps(chart, all, width);
  if (chart.band) drawBand(chart, all);
  for (const [key, , kind] of chart.lines) drawLine(chart, all, key, kind ?? "");
  chart.mark = svg("g", { class: "mark" });
  chart.picture.append(chart.mark);
}

function drawSteps(chart, all, width) {
  const room = Math.max(1, Math.floor((width - EDGE.left) / 48));
  const every = Math.max(1, Math.ceil(niceStep(all.length / room)));
  let labelled = -Infinity;
  all.forEach((entry, place) => {
    if (entry.broken) {
      const at = chart.scale.x(place);
      chart.picture.append(svg("line", { class: "broken", x1: at, x2: at, y1: EDGE.top, y2: HEIGHT - EDGE.bottom }));
    }
    const first = place === 0 || all[place - 1].step !== entry.step;
    const x = chart.scale.x(place);
    if (first && (place === 0 || entry.step % every === 0) && x - labelled > 34) {
      labelled = x;
      const anchor = x > width - 24 ? "end" : "middle";
      chart.picture.append(svg("text", { class: "tick", x, y: HEIGHT - 6, "text-anchor": anchor, text: String(entry.step) }));
    }
  });
}

function drawLine(chart, all, key, kind) {
  const { x, y } = chart.scale;
  let path = "";
  let open = false;
  all.forEach((entry, place) => {
    const value = entry.broken ? null : entry.statistics[key];
    if (!isNumber(value)) {
      open = false;
      return;
    }
    path += `${open ? "L" : "M"}${x(place).toFixed(1)} ${y(value).toFixed(1)}`;
    const next = all[place + 1];
    const alone = !open && !(next && !next.broken && isNumber(next.statistics[key]));
    if (alone && !kind) chart.picture.append(svg("circle", { class: "dot", cx: x(place), cy: y(value), r: 3 }));
    open = true;
  });
  chart.picture.append(svg("path", { class: `line ${kind}`, d: path }));
}

function drawBand(chart, all) {
  const { x, y } = chart.scale;
  let run = [];
  const close = () => {
    if (run.length > 1) {
      const upper = run.map(([place, , high]) => `${x(place).toFixed(1)} ${y(high).toFixed(1)}`);
      const lower = run.map(([place, low]) => `${x(place).toFixed(1)} ${y(low).toFixed(1)}`).reverse();
      chart.picture.append(svg("path", { class: "band", d: `M${[...upper, ...lower].join("L")}Z` }));
    }
    run = [];
  };
  all.forEach((entry, place) => {
    const [low, high] = entry.broken ? [null, null] : chart.band(entry.statistics);
    if (isNumber(low) && isNumber(high)) run.push([place, low, high]);
    else close();
  });
  close();
}

function showPointed(chart, all) {
  const last = all.length - 1;
  const entry = all[pointed ?? last];
  const form = chart.form ?? format;
  if (!entry || chart.card.classList.contains("empty")) {
    chart.value.textContent = "not recorded";
    return;
  }
  const [[first], ...others] = chart.lines;
  const value = entry.broken ? "broken" : form(entry.statistics[first]);
  const more = entry.broken ? [] : others.filter(([key]) => isNumber(entry.statistics[key]));
  const rest = more.map(([key, label]) => `${label} ${form(entry.statistics[key])}`).join(", ");
  chart.value.textContent = `${entryName(entry)}: ${value}${pointed !== null && rest ? ` (${rest})` : ""}`;
  if (!chart.scale) return;
  chart.mark.replaceChildren();
  if (pointed === null) return;
  const at = chart.scale.x(pointed);
  chart.mark.append(svg("line", { x1: at, x2: at, y1: EDGE.top, y2: HEIGHT - EDGE.bottom }));
  const exact = entry.broken ? null : entry.statistics[first];
  if (isNumber(exact)) chart.mark.append(svg("circle", { cx: at, cy: chart.scale.y(exact), r: 3.5 }));
}

function describe(chart, shown, known) {
  if (!known) return `${chart.title}: not recorded`;
  const form = chart.form ?? format;
  const found = shown.map((entry) => entry.statistics[chart.lines[0][0]]).filter(isNumber);
  const range = `from ${form(Math.min(...found))} to ${form(Math.max(...found))}, last ${form(found[found.length - 1])}`;
  return `${chart.title} over ${found.length} rollout steps: ${range}. The table below has all numbers.`;
}

function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return ([1, 2, 2.5, 5, 10].find((nice) => nice * power >= rough * 0.999) ?? 10) * power;
}

const round = (value) => Number(value.toPrecision(12));
