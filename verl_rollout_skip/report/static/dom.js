// Creates elements and formats values. Recorded text is inserted only as text nodes, never as markup.

const byId = (id) => document.getElementById(id);

function el(tag, options = {}, ...children) {
  const element = document.createElement(tag);
  fill(element, options);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function svg(tag, options = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  fill(element, options);
  element.append(...children);
  return element;
}

function fill(element, { text, on = {}, ...attributes }) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  if (text !== undefined) element.textContent = text;
  for (const [name, handler] of Object.entries(on)) element.addEventListener(name, handler);
}

// Invisible characters and characters that change how others are displayed: control characters, bidirectional marks,
// separators, tags. Joiners and variation selectors (U+200C, U+200D, U+FE00 to U+FE0F) are not escaped, because scripts and
// emoji need them.
const INVISIBLE = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u034f\\u061c\\u115f\\u1160\\u180e\\u200b\\u200e\\u200f" +
    "\\u2028-\\u202e\\u2060-\\u206f\\u3164\\ufeff\\ufff9-\\ufffb\\u{e0000}-\\u{e007f}\\ud800-\\udfff]",
  "gu",
);

function visible(text) {
  const parts = document.createDocumentFragment();
  let end = 0;
  for (const match of text.matchAll(INVISIBLE)) {
    if (match.index > end) parts.append(text.slice(end, match.index));
    parts.append(el("span", { class: "invisible", text: codeName(match[0].codePointAt(0)) }));
    end = match.index + match[0].length;
  }
  if (end < text.length) parts.append(text.slice(end));
  return parts;
}

function plainVisible(text) {
  return text.replace(INVISIBLE, (letter) => codeName(letter.codePointAt(0)));
}

function codeName(code) {
  const hex = code.toString(16);
  return code < 256 ? `\\x${hex.padStart(2, "0")}` : `U+${hex.toUpperCase().padStart(4, "0")}`;
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function format(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (!isNumber(value)) return plainVisible(String(value));
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  return value.toLocaleString("en-US", { maximumFractionDigits: digits });
}

const percent = (value) => (isNumber(value) ? `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)}%` : "–");

function bytes(value) {
  if (!isNumber(value)) return "–";
  for (const unit of ["B", "KB", "MB", "GB"]) {
    if (value < 1000) return unit === "B" ? `${value} B` : `${value.toFixed(1)} ${unit}`;
    value /= 1000;
  }
  return `${value.toFixed(1)} TB`;
}

function seconds(value) {
  if (!isNumber(value)) return "–";
  if (value === 0) return "0 s";
  if (value < 1) return `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)} ms`;
  return value < 100 ? `${value.toFixed(1)} s` : `${Math.round(value).toLocaleString("en-US")} s`;
}

// Make these nodes the children of a container. Only moves nodes that changed, so focus and open details are kept.
function syncChildren(container, nodes) {
  nodes.forEach((node, index) => {
    if (container.children[index] !== node) container.insertBefore(node, container.children[index] ?? null);
  });
  while (container.children.length > nodes.length) container.lastElementChild.remove();
}

function debounce(action, wait) {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(action, wait);
  };
}

function drawNotice(id, lines) {
  const notice = byId(id);
  notice.hidden = lines.length === 0;
  const list = notice.querySelector("ul");
  const now = lines.join("\n");
  if (list.dataset.lines === now) return;
  list.dataset.lines = now;
  const shown = lines.slice(0, 20).map((line) => el("li", {}, visible(line)));
  if (lines.length > 20) shown.push(el("li", { text: `and ${lines.length - 20} more: see the table` }));
  list.replaceChildren(...shown);
}
