// Renders a text token by token, shaded by probability, with special tokens and invisible characters made visible.

const SHORT_START = 300;
const SHORT_END = 60;
const SHADES = [[0.9, "p ≥ 0.9"], [0.5, "≥ 0.5"], [0.1, "≥ 0.1"], [0.01, "≥ 0.01"], [0, "< 0.01"]];

function shadeOf(hundredths) {
  const probability = Math.exp(-hundredths / 100);
  return SHADES.findIndex(([least]) => probability >= least);
}

function drawLegend() {
  const chips = SHADES.map(([, label], shade) => el("span", { class: `t l${shade}`, text: label }));
  byId("legend").replaceChildren(...chips, el("span", { class: "t special", text: "special token" }));
}

// A long text is shortened to its beginning, its end and the first search match, with buttons to show the rest.
function tokenText(group, text, label, query) {
  const box = el("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": label, dir: "auto" });
  const info = el("p", { class: "info quiet", "aria-live": "polite" });
  const found = matches(group, text, query);
  const draw = (ranges) => {
    box.replaceChildren(...spans(group, text, ranges, found, () => draw([[0, text.pieces.length]])));
  };
  draw(shownRanges(text.pieces.length, found));
  watchTokens(group, text, box, info);
  return [box, info];
}

function shownRanges(length, found) {
  if (length <= SHORT_START + SHORT_END + 20) return [[0, length]];
  const end = length - SHORT_END;
  const usual = [[0, SHORT_START], [end, length]];
  const first = Math.min(...found);
  if (!found.size || first < SHORT_START || first >= end) return usual;
  const [from, to] = [Math.max(SHORT_END, first - SHORT_START / 3), Math.min(end, first + SHORT_START / 2)];
  return [[0, SHORT_END], [from, to], [end, length]];
}

function spans(group, text, ranges, found, showAll) {
  const nodes = [];
  let index = 0;
  for (const [from, to] of ranges) {
    if (from > index) nodes.push(gapButton(index, from, found, showAll));
    for (index = from; index < to; index += 1) {
      if (index === text.cut_at) nodes.push(el("span", { class: "gap", text: `${format(text.cut)} tokens omitted` }));
      nodes.push(span(group, text, text.pieces[index], index, found));
    }
  }
  return nodes;
}

function gapButton(from, to, found, showAll) {
  const hidden = [...found].filter((index) => from <= index && index < to).length;
  const more = hidden ? `, ${format(hidden)} of them matching` : "";
  const label = `show ${format(to - from)} more tokens${more}`;
  return el("button", { type: "button", class: "gap", text: label, on: { click: showAll } });
}

const KIND_CLASSES = ["", " special", " bytes", " num"];

function span(group, text, number, index, found) {
  const piece = pieceOf(group, number);
  let names = `t${KIND_CLASSES[piece.kind]}`;
  const log_prob = text.log_probs?.[index];
  if (isNumber(log_prob)) names += ` l${shadeOf(log_prob)}`;
  if (text.not_generated?.[index]) names += " foreign";
  if (found.has(index)) names += " hit";
  const element = el("span", { class: names, "data-index": index });
  if (piece.kind === TEXT && /\s/.test(piece.text)) element.append(...spaced(piece.text));
  else element.append(visible(piece.text));
  return element;
}

// Spaces, tabs and line breaks get symbols, which CSS shows on request.
function spaced(text) {
  return text.split(/(\n| +|\t)/).filter(Boolean).flatMap((part) => {
    const sign = { "\n": "↵", "\t": "⇥", " ": "·" }[part[0]];
    if (!sign) return [visible(part)];
    const shown = part[0] === " " ? sign.repeat(part.length) : sign;
    return [el("span", { class: "space", "data-sign": shown, text: part })];
  });
}

function matches(group, text, query) {
  const found = new Set();
  if (!query) return found;
  const ends = [];
  let whole = "";
  for (const number of text.pieces) {
    whole += pieceOf(group, number).text;
    ends.push(whole.length);
  }
  const lower = whole.toLowerCase();
  if (lower.length !== whole.length) return found;
  let index = 0;
  for (let at = lower.indexOf(query); at >= 0; at = lower.indexOf(query, at + query.length)) {
    while (ends[index] <= at) index += 1;
    for (let other = index; other < ends.length && (ends[other - 1] ?? 0) < at + query.length; other += 1) found.add(other);
  }
  return found;
}

function watchTokens(group, text, box, info) {
  let current = null;
  const show = (element) => {
    current?.classList.remove("current");
    current = element;
    current?.classList.add("current");
    info.textContent = element ? tokenNote(group, text, Number(element.dataset.index)) : "";
  };
  box.addEventListener("pointerover", (event) => show(event.target.closest?.("[data-index]")));
  box.addEventListener("pointerleave", () => show(null));
  box.addEventListener("blur", () => show(null));
  box.addEventListener("keydown", (event) => {
    const to = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!to || event.target !== box) return;
    event.preventDefault();
    const all = [...box.querySelectorAll("[data-index]")];
    const at = current ? all.indexOf(current) + to : to > 0 ? 0 : all.length - 1;
    const next = all[Math.max(0, Math.min(all.length - 1, at))];
    if (next) {
      show(next);
      next.scrollIntoView({ block: "nearest" });
    }
  });
}

function tokenNote(group, text, index) {
  const piece = pieceOf(group, text.pieces[index]);
  const kinds = ["", "special token, ", "invalid UTF-8, ", "not in the vocabulary, "];
  const ids = piece.tokens.length > 1 ? `tokens ${piece.tokens.join(", ")}` : `token ${piece.tokens[0]}`;
  let note = `${JSON.stringify(plainVisible(piece.text))}, ${head.has_tokenizer ? kinds[piece.kind] : ""}${ids}`;
  const log_prob = text.log_probs?.[index];
  if (isNumber(log_prob)) {
    note += `, log-prob ${(-log_prob / 100).toFixed(2)}, probability ${percent(Math.exp(-log_prob / 100))}`;
  }
  return text.not_generated?.[index] ? `${note}, not generated by the model` : note;
}
