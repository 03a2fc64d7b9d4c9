// One card per group of responses to the same prompt, with the best and the worst response.

const PAGE_SIZE = 12;
let limit = PAGE_SIZE;
let cards = new Map();
let cardsFor = "";

function drawGroups() {
  const wanted = chosenGroups();
  const query = filters().text;
  if (query !== cardsFor) {
    cards = new Map();
    cardsFor = query;
  }
  const shown = wanted.slice(0, limit);
  const kept = new Map(shown.map((group) => [group.id, cards.get(group.id) ?? card(group, query)]));
  cards = kept;
  syncChildren(byId("list"), [...kept.values()]);
  const total = allGroups().length;
  const summary = `${format(wanted.length)} of ${format(total)} groups with text`;
  byId("count").textContent = wanted.length ? summary : `${summary}: no group matches these filters`;
  const more = byId("more");
  more.hidden = wanted.length <= limit;
  more.textContent = `Show ${format(Math.min(PAGE_SIZE, wanted.length - limit))} more of ${format(wanted.length)}`;
}

function showMore() {
  limit += PAGE_SIZE;
  drawGroups();
}

function firstPage() {
  limit = PAGE_SIZE;
}

// Remove the card of a group that is fetched again.
function dropCard(group) {
  cards.get(group.id)?.remove();
  cards.delete(group.id);
}

function card(group, query) {
  const title = el("h3", { id: `t-${group.id}` }, visible(titleOf(group)));
  const parts = [
    el("header", {}, title, el("p", { class: "meta" }, ...meta(group)), scoreBars(group)),
    promptPart(group, query),
    reference(group),
    el("div", { class: "pair" }, ...group.responses.map((response) => responsePart(group, response, query))),
    allResponses(group),
  ];
  const attributes = { class: "card", tabindex: -1, "aria-labelledby": `t-${group.id}`, "data-group": group.id };
  return el("article", attributes, ...parts);
}

function meta(group) {
  const count = group.rows.length;
  const scores = group.low === null ? "no scores" : count > 1
    ? `scores ${format(group.low)} to ${format(group.high)}, mean ${format(group.mean)}`
    : `score ${format(group.low)}`;
  const found = [`${entryName(group.entry)} · ${count} ${count === 1 ? "response" : "responses"} · ${scores} `];
  if (count > 1 && group.low !== null && group.spread === 0) found.push(badge("no variance"));
  if (group.atLimit) found.push(badge(`${group.atLimit} at the length limit`, "warn"));
  if (group.rows.some((row) => row.score !== null && !isNumber(row.score))) found.push(badge("score is not a number", "bad"));
  return found;
}

const badge = (text, kind = "") => el("span", { class: `badge ${kind}`, text });

// One bar per response, from best to worst. A dot above a bar marks a response at the length limit.
function scoreBars(group) {
  const shown = group.rows.slice(0, 64);
  if (group.low === null || shown.length < 2) return null;
  const low = Math.min(0, group.low);
  const span = Math.max(group.high, 0) - low || 1;
  const label = `scores from best to worst: ${shown.map((row) => format(row.score)).join(", ")}`;
  const bars = svg("svg", { class: "strip", role: "img", "aria-label": label, width: shown.length * 8, height: 30 });
  shown.forEach((row, index) => {
    const height = isNumber(row.score) ? 2 + (20 * (row.score - low)) / span : 1;
    bars.append(svg("rect", { x: index * 8, y: 30 - height, width: 6, height, class: row.passed ? "passed" : "" }));
    if (row.at_limit) bars.append(svg("circle", { cx: index * 8 + 3, cy: 3, r: 2 }));
  });
  bars.append(svg("title", { text: label }));
  return bars;
}

function promptPart(group, query) {
  const part = el("details", { class: "prompt" });
  const length = group.prompt ? ` (${format(group.prompt.length)} tokens)` : "";
  part.append(el("summary", { text: `Prompt${length}` }));
  const fillIn = () => {
    if (part.childElementCount > 1) return;
    if (group.prompt && head.has_tokenizer) part.append(...tokenText(group, group.prompt, "prompt", query));
    else if (group.messages) part.append(...group.messages.map(message));
    else if (group.prompt) part.append(...tokenText(group, group.prompt, "prompt", query));
    else part.append(el("p", { class: "quiet", text: "not recorded" }));
  };
  part.addEventListener("toggle", () => part.open && fillIn());
  return part;
}

const message = ([role, text]) => el("p", { class: "message" }, el("b", {}, visible(`${role}: `)), visible(text));

function reference(group) {
  const known = [["reference", group.reference], ["data source", group.data_source]].filter(([, value]) => value);
  if (!known.length) return null;
  const pairs = known.map(([name, value]) => el("div", {}, el("dt", { text: name }), el("dd", {}, visible(value))));
  return el("dl", { class: "facts small" }, ...pairs);
}

function responsePart(group, response, query) {
  const row = group.rows.find((other) => other.row === response.row);
  const label = labelOf(group, response);
  const facts = [`score ${format(row.score)}`];
  if (row.length !== null) facts.push(`${format(row.length)} tokens`);
  if (isNumber(response.mean_log_prob)) facts.push(`mean log-prob ${response.mean_log_prob.toFixed(2)}`);
  facts.push(`row ${response.row}`);
  for (const [name, value] of Object.entries(response.extras)) {
    facts.push(`${plainVisible(name.replace(/^__|__$/g, ""))} ${format(value)}`);
  }
  const top = el("h4", {}, el("span", { class: "label", text: label }));
  if (row.at_limit) top.append(badge("at the length limit", "warn"));
  const part = el("section", { class: "response", "data-row": response.row }, top, el("p", { class: "meta", text: facts.join(" · ") }));
  if (response.text) part.append(...tokenText(group, response.text, `${label} response`, query));
  else part.append(el("p", { class: "quiet", text: "tokens not recorded" }));
  return part;
}

function labelOf(group, response) {
  if (response.of === 1) return "only response";
  const [first, last] = group.spread > 0 ? ["best", "worst"] : ["shortest", "longest"];
  if (response.rank === 0) return first;
  return response.rank === response.of - 1 ? last : `rank ${response.rank + 1} of ${response.of}`;
}

function allResponses(group) {
  if (!head.live || group.responses.length >= group.rows.length) return null;
  const press = (event) => loadGroup(group, event.currentTarget);
  const text = `Load all ${group.rows.length} responses`;
  return el("button", { type: "button", class: "small", text, on: { click: press } });
}
