// Filters and sorts the groups. The filters are saved in the URL, so they survive a reload.

const FIELDS = {
  text: "f-text",
  steps: "f-steps",
  min: "f-min",
  max: "f-max",
  outcome: "f-outcome",
  source: "f-source",
  order: "f-order",
  variance: "f-variance",
  limit: "f-limit",
  bytes: "f-bytes",
  shade: "f-shade",
  special: "f-special",
  space: "f-space",
};
const ORDERS = {
  step: () => 0,
  newest: (one, other) => other.entry.step - one.entry.step || other.entry.gen_batch - one.entry.gen_batch,
  spread: (one, other) => other.spread - one.spread,
  worst: (one, other) => (one.mean ?? Infinity) - (other.mean ?? Infinity),
  best: (one, other) => (other.mean ?? -Infinity) - (one.mean ?? -Infinity),
  longest: (one, other) => other.longest - one.longest,
  surprising: (one, other) => likelihood(one) - likelihood(other),
};
let wantedSource = "";

function filters() {
  const found = {};
  for (const [name, id] of Object.entries(FIELDS)) {
    const field = byId(id);
    found[name] = field.type === "checkbox" ? field.checked : field.value;
  }
  found.text = found.text.trim().toLowerCase();
  return found;
}

function chosenGroups() {
  const wanted = filters();
  const steps = parseSteps(wanted.steps);
  byId("f-steps").ariaInvalid = String(steps === null);
  byId("steps-error").textContent = steps === null ? "Enter steps and ranges, for example 3 or 10-20, 40." : "";
  return allGroups()
    .filter((group) => matchesFilters(group, wanted, steps ?? []))
    .sort(ORDERS[wanted.order] ?? ORDERS.step);
}

function matchesFilters(group, wanted, steps) {
  const { step, gen_batch } = group.entry;
  if (steps.length && !steps.some(([from, to, batch]) => from <= step && step <= to && (batch ?? gen_batch) === gen_batch)) {
    return false;
  }
  if (wanted.variance && !(group.spread > 0)) return false;
  if (wanted.limit && !group.atLimit) return false;
  if (wanted.source && group.data_source !== wanted.source) return false;
  if (wanted.outcome && outcomeOf(group) !== wanted.outcome) return false;
  const [min, max] = [wanted.min, wanted.max].map((value) => (value === "" ? null : Number(value)));
  if (min !== null || max !== null) {
    const inside = ({ score }) => isNumber(score) && score >= (min ?? -Infinity) && score <= (max ?? Infinity);
    if (!group.rows.some(inside)) return false;
  }
  if (wanted.bytes && !hasBytes(group)) return false;
  return !wanted.text || searchText(group).includes(wanted.text);
}

function outcomeOf(group) {
  if (group.rows.some((row) => row.passed === null)) return "unknown";
  return group.passed === 0 ? "none" : group.passed === group.rows.length ? "all" : "mixed";
}

// Parses "3, 10-20", and "3.1" for a single generation batch of a step.
function parseSteps(text) {
  const found = [];
  for (const part of text.split(",").map((one) => one.trim()).filter(Boolean)) {
    const match = /^(\d+)(?:\s*-\s*(\d+)|\.(\d+))?$/.exec(part);
    if (!match) return null;
    const [, from, to, batch] = match;
    found.push([Number(from), Number(to ?? from), batch === undefined ? null : Number(batch)]);
  }
  return found;
}

function showStep(entry) {
  byId("f-steps").value = severalBatches() ? `${entry.step}.${entry.gen_batch}` : String(entry.step);
  changed();
  byId("groups").scrollIntoView();
  byId("groups").focus({ preventScroll: true });
}

function drawSources() {
  const sources = [...new Set(allGroups().map((group) => group.data_source).filter(Boolean))].sort();
  const field = byId("f-source");
  const chosen = field.value || wantedSource;
  byId("f-source-label").hidden = sources.length < 2;
  const known = [...field.options].slice(1).map((option) => option.value);
  if (known.join("\n") !== sources.join("\n")) {
    const options = sources.map((source) => el("option", { value: source, text: plainVisible(source) }));
    field.replaceChildren(el("option", { value: "", text: "any" }), ...options);
    field.value = sources.includes(chosen) ? chosen : "";
  }
}

function applyDisplayOptions() {
  const { shade, special, space } = filters();
  byId("groups").classList.toggle("shaded", shade);
  byId("groups").classList.toggle("specials", special);
  byId("groups").classList.toggle("spaces", space);
}

function saveFilters() {
  const kept = new URLSearchParams();
  for (const [name, id] of Object.entries(FIELDS)) {
    const field = byId(id);
    const [value, usual] = field.type === "checkbox"
      ? [field.checked ? "1" : "0", field.defaultChecked ? "1" : "0"]
      : [field.value, field.id === "f-order" ? "step" : ""];
    if (value !== usual) kept.set(name, value);
  }
  const hash = kept.toString();
  history.replaceState(null, "", hash ? `#${hash}` : "#");
}

function loadFilters() {
  const kept = new URLSearchParams(location.hash.slice(1));
  wantedSource = kept.get("source") ?? "";
  for (const [name, id] of Object.entries(FIELDS)) {
    const field = byId(id);
    if (!kept.has(name)) continue;
    if (field.type === "checkbox") field.checked = kept.get(name) === "1";
    else field.value = kept.get(name);
  }
  if (!byId("f-order").value) byId("f-order").value = "step";
}

function changed() {
  firstPage();
  saveFilters();
  applyDisplayOptions();
  drawGroups();
}
