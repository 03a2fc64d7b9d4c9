// The live view: polls the server for changes and adds them without changing filters, sorting or open cards.

const POLL_MS = 1500;
let revision = 0;

async function fetchJson(what) {
  const answer = await fetch(what, { cache: "no-store", credentials: "omit", redirect: "error" });
  if (!answer.ok) throw new Error(`${answer.status}: ${await answer.text()}`);
  return answer.json();
}

async function poll() {
  let wait = POLL_MS;
  try {
    const changes = await fetchJson(`api/changes?after=${revision}`);
    revision = changes.revision;
    changes.removed.forEach(removeEntry);
    changes.entries.forEach(addEntry);
    if (changes.entries.length || changes.removed.length) drawAll();
    drawNotes(changes.problems, changes.left_out);
    showStatus(changes.reading ? `reading, ${format(changes.reading)} left` : "live", "good");
    if (changes.more) wait = 0;
  } catch (error) {
    showStatus("no connection", "bad");
    wait = 2 * POLL_MS;
  }
  setTimeout(poll, wait);
}

function showStatus(text, kind) {
  const pill = byId("live");
  pill.hidden = false;
  pill.className = `pill ${kind}`;
  const steps = `${format(entries.size)} ${entries.size === 1 ? "step" : "steps"}`;
  const label = `${text} · ${steps}`;
  if (pill.textContent !== label) pill.textContent = label;
}

async function loadMore(entry, button) {
  await withBusyButton(button, async () => {
    const asked = `step=${entry.step}&gen_batch=${entry.gen_batch}&start=${entry.loaded ?? entry.groups.length}`;
    const found = await fetchJson(`api/groups?${asked}`);
    entry.loaded = (entry.loaded ?? entry.groups.length) + found.groups.length;
    addGroups(entry, found);
    drawAll();
    showStep(entry);
  });
}

async function loadGroup(group, button) {
  await withBusyButton(button, async () => {
    const { step, gen_batch } = group.entry;
    const found = await fetchJson(`api/group?step=${step}&gen_batch=${gen_batch}&number=${group.number}`);
    dropCard(group);
    addGroups(group.entry, found);
    drawGroups();
  });
}

async function withBusyButton(button, work) {
  const text = button.textContent;
  button.disabled = true;
  button.textContent = "loading…";
  try {
    await work();
  } catch (error) {
    button.textContent = `failed (${plainVisible(error.message)}), try again`;
    button.disabled = false;
    return;
  }
  button.textContent = text;
  button.disabled = false;
}
