// The data of the page: the recording's metadata, its rollout steps, and their groups.

const TEXT = 0;
const SPECIAL = 1;
const BYTES = 2;
const NUMBER = 3;

const data = JSON.parse(byId("data").textContent);
byId("data").remove();
const head = data.head;
const entries = new Map();

const entryId = (entry) => `${entry.step}.${entry.gen_batch}`;
const entryName = (entry) =>
  severalBatches() ? `step ${entry.step}, generation batch ${entry.gen_batch}` : `step ${entry.step}`;

let batchesSeen = false;
const severalBatches = () => batchesSeen;

function addEntry(entry) {
  batchesSeen ||= entry.gen_batch > 0;
  entries.set(entryId(entry), entry);
  adoptGroups(entry, entry.groups, entry.vocabulary ?? []);
}

function removeEntry(id) {
  entries.delete(id);
}

function adoptGroups(entry, groups, vocabulary) {
  for (const group of groups) {
    group.entry = entry;
    group.vocabulary = vocabulary;
    group.id = `${entryId(entry)}/${entry.digest}/${group.number}`;
    const scores = group.rows.map((row) => row.score).filter(isNumber);
    group.low = scores.length ? Math.min(...scores) : null;
    group.high = scores.length ? Math.max(...scores) : null;
    group.mean = scores.length ? scores.reduce((sum, score) => sum + score, 0) / scores.length : null;
    group.spread = scores.length > 1 ? group.high - group.low : 0;
    group.longest = Math.max(0, ...group.rows.map((row) => row.length ?? 0));
    group.passed = group.rows.filter((row) => row.passed === true).length;
    group.atLimit = group.rows.filter((row) => row.at_limit).length;
  }
}

// Fetched groups replace those with the same number.
function addGroups(entry, { groups, vocabulary }) {
  adoptGroups(entry, groups, vocabulary);
  const byNumber = new Map([...entry.groups, ...groups].map((group) => [group.number, group]));
  entry.groups = [...byNumber.values()].sort((one, other) => one.number - other.number);
}

const inOrder = () =>
  [...entries.values()].sort((one, other) => one.step - other.step || one.gen_batch - other.gen_batch);

const readable = () => inOrder().filter((entry) => !entry.broken);

const allGroups = () => readable().flatMap((entry) => entry.groups);

const pieceOf = (group, number) => {
  const [text, kind, tokens] = group.vocabulary[number];
  return { text: kind === NUMBER ? ` ${text} ` : text, kind, tokens };
};

const textOf = (group, text) =>
  text === null ? "" : text.pieces.map((number) => pieceOf(group, number).text).join("");

function titleOf(group) {
  const asked = (group.messages ?? []).filter(([role]) => role === "user").pop() ?? group.messages?.[0];
  const text = (asked ? asked[1] : textOf(group, group.prompt)).trim();
  return text.length > 160 ? `${text.slice(0, 160)}…` : text || "(no prompt recorded)";
}

function searchText(group) {
  group.search ??= [
    ...(group.messages ?? []).map(([, text]) => text),
    textOf(group, group.prompt),
    group.reference ?? "",
    group.data_source ?? "",
    ...group.responses.map((response) => textOf(group, response.text)),
  ]
    .join("\n")
    .toLowerCase();
  return group.search;
}

const hasBytes = (group) =>
  [group.prompt, ...group.responses.map((response) => response.text)].some(
    (text) => text !== null && text.pieces.some((number) => group.vocabulary[number][1] === BYTES),
  );

const likelihood = (group) =>
  Math.min(...group.responses.map((response) => (isNumber(response.mean_log_prob) ? response.mean_log_prob : 0)));
