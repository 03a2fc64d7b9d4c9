// Small line charts over the rollout steps, drawn as SVG. All charts highlight the same step.

const HEIGHT = 150;
const EDGE = { left: 52, right: 10, top: 8, bottom: 22 };

let hovered = null;
let drawn = [];

function setCharts(charts) {
  drawn = charts.map((chart) => makeChart(chart));
  byId("charts").replaceChildren(...drawn.map(({ card }) => card));
}

function drawCharts() {
  const all = inOrder();
  hovered = hovered === null ? null : Math.min(hovered, all.length - 1);
  for (const chart of drawn) redraw(chart, all);
}

const redrawOnResize = () => new ResizeObserver(debounce(drawCharts, 100)).observe(byId("charts"));

function makeChart(chart) {
  const value = el("span", { class: "value" });
  const note = el("p", { class: "quiet note" });
  const plot = svg("svg", { class: "chart", tabindex: 0, role: "img" });
  const card = el("figure", { class: "panel", "data-chart": chart.key },
    el("figcaption", {}, el("h3", { text: chart.title }), value), plot, note);
  const made = { ...chart, card, plot, value, noteLine: note, scale: null };
  plot.addEventListener("pointermove", (event) => hover(nearestIndex(made, event)));
  plot.addEventListener("pointerleave", () => hover(null));
  plot.addEventListener("click", (event) => selectStep(made, nearestIndex(made, event)));
  plot.addEventListener("focus", () => value.setAttribute("aria-live", "polite"));
  plot.addEventListener("blur", () => {
    value.removeAttribute("aria-live"); // otherwise a screen reader would read out all charts at once
    hover(null);
  });
  plot.addEventListener("keydown", (event) => moveHover(made, event));
  return made;
}

function moveHover(chart, event) {
  const last = inOrder().length - 1;
  const targets = { ArrowLeft: (hovered ?? last + 1) - 1, ArrowRight: (hovered ?? -1) + 1, Home: 0, End: last };
  if (event.key in targets) {
    hover(Math.max(0, Math.min(last, targets[event.key])));
    event.preventDefault();
  } else if (event.key === "Enter" && hovered !== null) {
    selectStep(chart, hovered);
  }
}

function nearestIndex(chart, event) {
  if (!chart.scale) return null;
  const box = chart.plot.getBoundingClientRect();
  return chart.scale.indexAt(event.clientX - box.left);
}

function selectStep(chart, index) {
  const entry = inOrder()[index];
  if (entry) chart.select?.(entry);
}

function hover(index) {
  hovered = index;
  const all = inOrder();
  for (const chart of drawn) showHovered(chart, all);
}

function redraw(chart, all) {
  const width = Math.max(220, chart.plot.clientWidth || chart.card.clientWidth - 24);
  const shown = all.filter((entry) => !entry.broken);
  chart.noteLine.textContent = typeof chart.note === "function" ? chart.note(shown) : chart.note ?? "";
  chart.plot.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  chart.plot.setAttribute("height", HEIGHT);
  const values = shown.flatMap((entry) => valuesOf(chart, entry)).filter(isNumber);
  const known = shown.some((entry) => isNumber(entry.statistics[chart.lines[0][0]]));
  chart.card.classList.toggle("empty", !known);
  chart.plot.replaceChildren();
  chart.scale = null;
  if (known) drawLines(chart, all, width, values);
  chart.plot.setAttribute("aria-label", describe(chart, shown, known));
  showHovered(chart, all);
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
  const x = (index) => EDGE.left + (all.length > 1 ? index * gap : inner / 2);
  const y = (value) => EDGE.top + (HEIGHT - EDGE.top - EDGE.bottom) * (1 - (value - low) / (high - low));
  const indexAt = (at) => (gap ? Math.max(0, Math.min(all.length - 1, Math.round((at - EDGE.left) / gap))) : 0);
  chart.scale = { x, y, indexAt };
  const formatValue = chart.formatValue ?? format;
  const ticks = chart.range ? 2 : Math.round((high - low) / step);
  for (let number = 0; number <= ticks; number += 1) {
    const tick = low + (number * (high - low)) / ticks;
    chart.plot.append(
      svg("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: y(tick), y2: y(tick) }),
      svg("text", { class: "tick", x: EDGE.left - 6, y: y(tick) + 4, "text-anchor": "end", text: (chart.formatTick ?? formatValue)(round(tick)) }),
    );
  }
  drawSteps(chart, all, width);
  if (chart.band) drawBand(chart, all);
  for (const [key, , kind] of chart.lines) drawLine(chart, all, key, kind ?? "");
  chart.mark = svg("g", { class: "mark" });
  chart.plot.append(chart.mark);
}

function drawSteps(chart, all, width) {
  const room = Math.max(1, Math.floor((width - EDGE.left) / 48));
  const every = Math.max(1, Math.ceil(niceStep(all.length / room)));
  let lastLabelX = -Infinity;
  all.forEach((entry, index) => {
    if (entry.broken || entry.step === chart.markedStep) {
      const at = chart.scale.x(index);
      chart.plot.append(svg("line", { class: "broken", x1: at, x2: at, y1: EDGE.top, y2: HEIGHT - EDGE.bottom }));
    }
    const first = index === 0 || all[index - 1].step !== entry.step;
    const x = chart.scale.x(index);
    if (first && (index === 0 || entry.step % every === 0) && x - lastLabelX > 34) {
      lastLabelX = x;
      const anchor = x > width - 24 ? "end" : "middle";
      chart.plot.append(svg("text", { class: "tick", x, y: HEIGHT - 6, "text-anchor": anchor, text: String(entry.step) }));
    }
  });
}

function drawLine(chart, all, key, kind) {
  const { x, y } = chart.scale;
  let path = "";
  let open = false;
  all.forEach((entry, index) => {
    const value = entry.broken ? null : entry.statistics[key];
    if (!isNumber(value)) {
      open = false;
      return;
    }
    path += `${open ? "L" : "M"}${x(index).toFixed(1)} ${y(value).toFixed(1)}`;
    const next = all[index + 1];
    const alone = !open && !(next && !next.broken && isNumber(next.statistics[key]));
    if (alone && ["", "other"].includes(kind)) chart.plot.append(svg("circle", { class: `dot ${kind}`, cx: x(index), cy: y(value), r: 3 }));
    open = true;
  });
  chart.plot.append(svg("path", { class: `line ${kind}`, d: path }));
}

function drawBand(chart, all) {
  const { x, y } = chart.scale;
  let run = [];
  const close = () => {
    if (run.length > 1) {
      const upper = run.map(([index, , high]) => `${x(index).toFixed(1)} ${y(high).toFixed(1)}`);
      const lower = run.map(([index, low]) => `${x(index).toFixed(1)} ${y(low).toFixed(1)}`).reverse();
      chart.plot.append(svg("path", { class: "band", d: `M${[...upper, ...lower].join("L")}Z` }));
    }
    run = [];
  };
  all.forEach((entry, index) => {
    const [low, high] = entry.broken ? [null, null] : chart.band(entry.statistics);
    if (isNumber(low) && isNumber(high)) run.push([index, low, high]);
    else close();
  });
  close();
}

function showHovered(chart, all) {
  const last = all.length - 1;
  const entry = all[hovered ?? last];
  const formatValue = chart.formatValue ?? format;
  if (!entry || chart.card.classList.contains("empty")) {
    chart.value.textContent = "not recorded";
    return;
  }
  const [[first], ...others] = chart.lines;
  const value = entry.broken ? "broken" : formatValue(entry.statistics[first]);
  const more = entry.broken ? [] : others.filter(([key]) => isNumber(entry.statistics[key]));
  const rest = more.map(([key, label]) => `${label} ${formatValue(entry.statistics[key])}`).join(", ");
  chart.value.textContent = `${entryName(entry)}: ${value}${hovered !== null && rest ? ` (${rest})` : ""}`;
  if (!chart.scale) return;
  chart.mark.replaceChildren();
  if (hovered === null) return;
  const at = chart.scale.x(hovered);
  chart.mark.append(svg("line", { x1: at, x2: at, y1: EDGE.top, y2: HEIGHT - EDGE.bottom }));
  const exact = entry.broken ? null : entry.statistics[first];
  if (isNumber(exact)) chart.mark.append(svg("circle", { cx: at, cy: chart.scale.y(exact), r: 3.5 }));
}

function describe(chart, shown, known) {
  if (!known) return `${chart.title}: not recorded`;
  const formatValue = chart.formatValue ?? format;
  const found = shown.map((entry) => entry.statistics[chart.lines[0][0]]).filter(isNumber);
  const range = `from ${formatValue(Math.min(...found))} to ${formatValue(Math.max(...found))}, last ${formatValue(found[found.length - 1])}`;
  return `${chart.title} over ${found.length} rollout steps: ${range}. The table below has all numbers.`;
}

function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return ([1, 2, 2.5, 5, 10].find((nice) => nice * power >= rough * 0.999) ?? 10) * power;
}

const round = (value) => Number(value.toPrecision(12));
