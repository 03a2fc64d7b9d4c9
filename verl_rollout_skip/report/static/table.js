// A table with one row per rollout step, sortable by any column.

const INITIAL_ROWS = 60;
const COLUMNS = [
  { key: "step", label: "Step", value: (entry) => entry.step, show: (value) => String(value) },
  { key: "gen_batch", label: "Batch", title: "Generation batch within the step", value: (entry) => entry.gen_batch },
  { key: "rows", label: "Responses" },
  { key: "score", label: "Score", title: "Mean score" },
  { key: "score_std", label: "± std", title: "Standard deviation of the scores" },
  { key: "pass_rate", label: "Pass rate", show: percent },
  { key: "length_p50", label: "Median length", title: "Median response length in tokens", show: (v) => format(v, 0) },
  { key: "length_p90", label: "p90 length", title: "90th percentile of the response length", show: (v) => format(v, 0) },
  { key: "length_max", label: "Longest" },
  { key: "at_limit", label: "At limit", title: "Responses at the length limit", show: percent },
  { key: "zero_variance", label: "No variance", title: "Groups whose scores are all equal", show: percent },
  { key: "generate_s", label: "Generated in", show: seconds },
  { key: "bytes", label: "Size", show: bytes },
];
const order = { key: "step", down: false };
let showAllRows = false;

const columnValue = (column, entry) => {
  if (column.value) return column.value(entry);
  return entry.broken ? null : entry.statistics[column.key];
};

function sortedEntries() {
  const column = COLUMNS.find(({ key }) => key === order.key);
  const sign = order.down ? -1 : 1;
  return inOrder().sort((one, other) => {
    const [left, right] = [columnValue(column, one), columnValue(column, other)];
    if (!isNumber(left) || !isNumber(right)) return isNumber(right) - isNumber(left);
    return sign * (left - right);
  });
}

function drawTable() {
  const table = byId("steps");
  if (!table.tHead) table.append(el("thead", {}, el("tr")), el("tbody"));
  const columns = COLUMNS.filter(({ key }) => key !== "gen_batch" || severalBatches());
  drawHeader(table.tHead.rows[0], columns);
  const rows = sortedEntries();
  const shown = showAllRows ? rows : rows.slice(0, INITIAL_ROWS);
  const focused = document.activeElement?.closest?.("tbody tr")?.dataset.entry;
  table.tBodies[0].replaceChildren(...shown.map((entry) => tableRow(entry, columns)));
  if (focused) table.querySelector(`tr[data-entry="${CSS.escape(focused)}"] button`)?.focus();
  const button = byId("all-steps");
  button.hidden = shown.length === rows.length;
  button.textContent = `Show all ${rows.length.toLocaleString("en-US")} rows`;
}

function drawHeader(row, columns) {
  if (row.cells.length !== columns.length + 1) {
    const cells = columns.map(({ key, label, title }) => {
      const press = () => sortBy(key);
      const button = el("button", { type: "button", title, text: label, on: { click: press } });
      return el("th", { scope: "col", "data-key": key }, button);
    });
    row.replaceChildren(...cells, el("th", { scope: "col", class: "left", text: "Groups shown" }));
  }
  for (const cell of row.cells) {
    const sorted = cell.dataset.key === order.key;
    cell.ariaSort = sorted ? (order.down ? "descending" : "ascending") : null;
    cell.classList.toggle("sorted", sorted);
  }
}

function sortBy(key) {
  order.down = order.key === key ? !order.down : false;
  order.key = key;
  drawTable();
}

function tableRow(entry, columns) {
  const row = el("tr", { "data-entry": entryId(entry), class: entry.broken ? "bad" : "" });
  const cells = entry.broken ? columns.filter(({ value }) => value) : columns;
  for (const column of cells) {
    row.append(el("td", { text: (column.show ?? format)(columnValue(column, entry)) }));
  }
  if (entry.broken) {
    row.append(el("td", { class: "left", colspan: columns.length - cells.length + 1 }, "broken: ", visible(entry.broken)));
    return row;
  }
  const label = `${format(entry.groups.length)} of ${format(entry.all_groups)}`;
  const show = el("button", { type: "button", class: "link", text: label, on: { click: () => showStep(entry) } });
  show.setAttribute("aria-label", `Show the groups of ${entryName(entry)}: ${label} with text`);
  row.append(el("td", { class: "left" }, show, moreButton(entry)));
  return row;
}

function moreButton(entry) {
  if (!head.live || entry.groups.length >= entry.all_groups) return null;
  const press = (event) => loadMore(entry, event.currentTarget);
  const button = el("button", { type: "button", class: "small", text: "load more", on: { click: press } });
  button.setAttribute("aria-label", `Load more groups of ${entryName(entry)}`);
  return button;
}
