// The section about the mismatch of rollout and trainer: tables that are already formatted.

function drawMismatch() {
  const found = head.mismatch;
  byId("mismatch").hidden = !found;
  if (!found) return;
  byId("mismatch-training").replaceChildren(visible(`training ${found.training}`));
  byId("mismatch-notes").replaceChildren(...found.notes.map((note) => el("li", {}, visible(note))));
  byId("mismatch-tables").replaceChildren(...found.tables.flatMap(mismatchTable));
}

function mismatchTable({ title, headers, rows, left }) {
  const align = (index) => (index < left || headers[index] === "text" ? "left" : null);
  const row = (cells) => el("tr", {}, ...cells.map((cell, index) => el("td", { class: align(index) }, mismatchCell(cell))));
  const labels = headers.map((name, index) => el("th", { scope: "col", class: align(index), text: name }));
  const table = el("table", {}, el("thead", {}, el("tr", {}, ...labels)), el("tbody", {}, ...rows.map(row)));
  return [
    el("h3", { text: title }),
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title }, table),
  ];
}

function mismatchCell(cell) {
  if (typeof cell === "string") return visible(cell);
  const [before, token, after] = cell;
  return el("span", {}, visible(before), el("mark", {}, visible(token)), visible(after));
}
