// The live view: asks its server what is new and adds it, without touching what the user has chosen.

const EVERY_MS = 1500;
let revision = 0;

async function ask(what) {
  const answer = await fetch(what, { cache: "no-store", credentials: "omit", redirect: "error" });
  if (!answer.ok) throw new Error(`${answer.status}: ${await answer.text()}`);
  return answer.json();
}

async function follow() {
  let wait = EVERY_MS;
  try {
    const news = await ask(`api/news?after=${revision}`);
    revision = news.revision;
    news.removed.forEach(removeEntry);
    news.entries.forEach(putEntry);
    if (news.entries.length || news.removed.length) drawAll();
    drawNotes(news.problems, news.left_out);
    tellLive(news.reading ? `reading, ${format(news.reading)} to go` : "live", "good");
    if (news.more) wait = 0;
  } catch (error) {
    tellLive("no connection", "bad");
    wait = 2 * EVERY_MS;
  }
  setTimeout(follow, wait);
}

function tellLive(text, kind) {
  const pill = byId("live");
  pill.hidden = false;
  pill.className = `pill ${kind}`;
  const steps = `${format(entries.size)} ${entries.size === 1 ? "step" : "steps"}`;
  const words = `${text} · ${steps}`;
  if (pill.textContent !== words) pill.textContent = words;
}

async function loadMore(entry, button) {
  await busy(button, async () => {
    const asked = `step=${entry.step}&gen_batch=${entry.gen_batch}&start=${entry.loaded ?? entry.groups.length}`;
    const found = await ask(`api/groups?${asked}`);
    entry.loaded = (entry.loaded ?? entry.groups.length) + found.groups.length;
    addGroups(entry, found);
    drawAll();
    showStep(entry);
  });
}

async function loadGroup(group, button) {
  await busy(button, async () => {
    const { step, gen_batch } = group.entry;
    const found = await ask(`api/group?step=${step}&gen_batch=${gen_batch}&number=${group.number}`);
    forgetCard(group);
    addGroups(group.entry, found);
    drawGroups();
  });
}

async function busy(button, work) {
  const text = button.textContent;
  button.disabled = true;
  button.textContent = "loading…";
  try {
    await work();
  } catch (error) {
    button.textContent = `not loaded (${plainVisible(error.message)}); try again`;
    button.disabled = false;
    return;
  }
  button.textContent = text;
  button.disabled = false;
}
