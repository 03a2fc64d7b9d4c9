// The color theme: system, light or dark.

const THEMES = ["auto", "light", "dark"];

function readTheme() {
  try {
    return localStorage.getItem("rollout-skip-theme") ?? "auto";
  } catch {
    return "auto"; // a page opened from a file may have no access to local storage
  }
}

function setTheme(theme) {
  const known = THEMES.includes(theme) ? theme : "auto";
  document.documentElement.dataset.theme = known;
  byId("theme").textContent = `Theme: ${known}`;
  byId("theme").setAttribute("aria-label", `Theme: ${known}. Press to change.`);
  try {
    localStorage.setItem("rollout-skip-theme", known);
  } catch {
    return;
  }
}

const nextTheme = () =>
  setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]);
