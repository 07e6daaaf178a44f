"use strict";
// All text comes in through text nodes: nothing that a completion holds is read as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const SHOWN = 6; // groups at once

function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== ""));
  return node;
}

function number(value, digits = 2) {
  return typeof value === "number" ? String(+value.toFixed(digits)) : "–";
}

// A text, or its beginning, how many characters are left out, and its end.
function text(value) {
  if (typeof value === "string") return [value];
  const [head, left, tail] = value;
  const mark = `\n[… ${left.toLocaleString("en")} characters left out …]\n`;
  return [head, el("span", { className: "cutmark" }, mark), tail];
}

function table({ title, head, rows, empty, folded }) {
  const cell = (tag) => (value) => el(tag, {}, value);
  const body = rows.map((row) => el("tr", {}, row.map(cell("td"))));
  const parts = [head ? el("thead", {}, el("tr", {}, head.map(cell("th")))) : null, el("tbody", {}, body)];
  const shown = rows.length ? el("div", { className: "scroll" }, el("table", {}, parts)) : el("p", {}, empty || "");
  if (folded) return el("details", {}, el("summary", {}, title), shown);
  return el("div", { className: "block" }, el("h3", {}, title), shown);
}

// ---- Verdict

function bar(ends) {
  const at = (share) => `${100 * Math.min(1, Math.max(0, share))}%`;
  const node = el("div", { className: "bar" });
  ends.forEach(({ mean, low, high }, end) => {
    const which = `end${ends.length === 1 ? 1 : end}`;
    if (low !== null) {
      const band = el("i", { className: which });
      band.style.left = at(low);
      band.style.width = `calc(${at(high)} - ${at(low)})`;
      node.append(band);
    }
    const dot = el("b", { className: which });
    dot.style.left = at(mean);
    node.append(dot);
  });
  return node;
}

function scoreRow({ label, ends, change }) {
  const cell = (text) => {
    const [main, ...below] = text.split(" ");
    return el("td", {}, el("strong", {}, main), el("br"), el("small", {}, below.join(" ")));
  };
  const cells = ends.map(({ text }) => cell(text));
  if (cells.length === 1) cells.push(el("td"));
  const isShare = ends.every(({ low, high }) => low >= 0 && high <= 1);
  return el("tr", {}, el("td", {}, label), ...cells, cell(change), el("td", {}, isShare ? bar(ends) : ""));
}

function finding({ name, since, until, evidence, key, remedy }) {
  const when = until === null ? `since step ${since}` : `steps ${since} to ${until}; over`;
  const title = el("h3", {}, name, " ", el("small", { className: "note" }, when));
  const does = el("p", {}, key ? el("code", {}, key) : null, key ? " " : null, remedy);
  return el("div", { className: until === null ? "finding" : "finding over" }, title, el("p", {}, evidence), does);
}

function showVerdict({ tone, headline, why, kind, scores, facts, findings }) {
  const place = byId("verdict");
  place.replaceChildren(); // which was there for readers without JavaScript
  const [first, ...others] = why;
  place.append(el("h1", {}, headline), el("p", { className: `why ${tone}` }, first));
  others.forEach((sentence) => place.append(el("p", {}, sentence)));
  const open = findings.filter((each) => each.until === null);
  const over = findings.filter((each) => each.until !== null);
  const count = open.length ? `${open.length} open finding${open.length > 1 ? "s" : ""}` : "No open findings";
  place.append(el("h2", {}, count), ...open.map(finding));
  if (over.length) place.append(el("details", {}, el("summary", {}, `${over.length} that ended`), over.map(finding)));
  const pair = ([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value));
  place.append(el("dl", { className: "facts" }, Object.entries(facts).map(pair)));
  if (scores.length) {
    const names = [kind, "before", "after", "change", "0 to 100 %, with 95 % intervals"];
    const head = el("thead", {}, el("tr", {}, names.map((name) => el("th", {}, name))));
    const body = el("tbody", {}, scores.map(scoreRow));
    place.append(el("div", { className: "scroll" }, el("table", { className: "scores" }, head, body)));
  }
}

// ---- Curves

// What a curve says to those who cannot see it.
function inWords({ label, steps, values }) {
  const at = (place) => `${number(values.at(place))} at step ${steps.at(place)}`;
  return `${label}: ${at(0)}, ${at(-1)}`;
}

function showPanel({ title, what, lines }, position) {
  const keys = lines.length > 1 ? lines.map(({ label, colour }) => {
    const key = el("span", {}, label);
    key.style.setProperty("--key", `var(--c${colour})`);
    return key;
  }) : [];
  const plot = el("div", { className: "plot", id: `panel-${position}`, role: "img", "aria-label": lines.map(inWords).join("; ") });
  const card = el("div", { className: "card" }, el("h3", {}, title), el("p", { className: "what" }, what),
    el("div", { className: "legend" }, keys), plot);
  byId("panels").append(card);
}

// ---- Completions

const chosen = { step: "", prompt: "", filter: "", shown: SHOWN };
const promptOf = (group) => (group.index === null ? text(group.prompt)[0] : String(group.index));

// Where the line begins in which prompts first differ: few-shot examples, say, are the same in all.
function sharedStart(prompts) {
  let same = prompts[0].length;
  for (const prompt of prompts) {
    let at = 0;
    while (at < same && prompt[at] === prompts[0][at]) at += 1;
    same = at;
  }
  return prompts.length > 1 ? prompts[0].lastIndexOf("\n", same - 1) + 1 : 0;
}

const ownFrom = data.groups.length ? sharedStart([...new Set(data.groups.map((group) => text(group.prompt)[0]))]) : 0;

function showPrompt(prompt) {
  const [head, ...rest] = text(prompt);
  return el("pre", { dir: "auto" }, head.slice(0, ownFrom), el("span", { className: "own" }, head.slice(ownFrom)), rest);
}

// Equal answers with equal rewards are one card that counts them.
function merged(rows) {
  const cards = new Map();
  for (const row of rows) {
    const key = JSON.stringify([row.text, row.reward, row.advantage, row.ended, row.failed]);
    const card = cards.get(key) || { ...row, count: 0, is: [] };
    cards.set(key, { ...card, count: card.count + 1, is: [...card.is, ...row.is] });
  }
  return [...cards.values()].sort((a, b) => (b.advantage || 0) - (a.advantage || 0));
}

function showRow(row, largest) {
  const much = largest ? Math.sqrt(Math.abs(row.advantage || 0) / largest) : 0;
  const dim = chosen.filter && !row.is.includes(chosen.filter);
  const card = el("div", { className: `row${row.advantage < 0 ? " below" : ""}${dim ? " dim" : ""}` });
  card.style.setProperty("--much", `${Math.round(100 * much)}%`);
  const cut = row.is.includes("cut");
  const isBlank = typeof row.text === "string" && !row.text.trim();
  const parts = [
    ...row.rewards.map(([name, score]) => `${name} ${score === null ? "none" : number(score)}`),
    `${number(row.tokens, 0)} tokens`,
    row.sampler_logprob === null ? "" : `log-prob ${number(row.sampler_logprob, 3)}, trainer ${number(row.trainer_logprob, 3)}`,
  ].filter(Boolean).map((part) => el("span", {}, part));
  const ended = el("span", { className: cut ? "tag" : "" }, row.ended);
  const failed = row.failed.map((name) => el("span", { className: "tag" }, `${name} failed`));
  const extra = row.extra.map(([name, value]) => el("span", { dir: "auto" }, `${name}: `, text(value)));
  card.append(
    el("div", { className: "head" }, el("strong", {}, `${row.count > 1 ? `${row.count} × ` : ""}reward ${number(row.reward)}`), el("span", {}, `advantage ${number(row.advantage)}`)),
    el("pre", { dir: "auto" }, isBlank ? el("span", { className: "cutmark" }, "[empty]") : text(row.text)),
    el("div", { className: "foot" }, parts, ended, failed, extra));
  return card;
}

function showGroup(group) {
  const advantages = group.rows.map((row) => Math.abs(row.advantage || 0));
  const largest = Math.max(0, ...advantages);
  const columns = group.columns.map(([name, value]) => el("small", { dir: "auto" }, `${name}: `, text(value)));
  const title = `Step ${group.step}` + (group.index === null ? "" : `, prompt #${group.index}`);
  return el("article", { className: "group", tabIndex: -1 }, el("h3", {}, title, columns,
    largest ? null : el("small", {}, "all alike: teaches nothing")),
  showPrompt(group.prompt), el("div", { className: "rows" }, merged(group.rows).map((row) => showRow(row, largest))));
}

function inView(group) {
  return (!chosen.step || String(group.step) === chosen.step) && (!chosen.prompt || promptOf(group) === chosen.prompt);
}

function showGroups() {
  const found = data.groups.filter((group) => inView(group) &&
    (!chosen.filter || group.rows.some((row) => row.is.includes(chosen.filter))));
  const teaches = (group) => group.rows[0].is.includes("mixed");
  // The latest step first, in it what teaches; one prompt from its first step on.
  if (!chosen.prompt) found.sort((a, b) => b.step - a.step || teaches(b) - teaches(a));
  const place = byId("groups");
  place.replaceChildren(...found.slice(0, chosen.shown).map(showGroup));
  for (const own of place.querySelectorAll(".own")) own.parentNode.scrollTop = own.offsetTop - own.parentNode.offsetTop;
  if (!found.length) place.append(el("p", {}, "None."));
  if (found.length > chosen.shown) {
    const more = el("button", { type: "button" }, `more (${found.length - chosen.shown} groups)`);
    more.onclick = () => {
      const next = chosen.shown;
      choose({ shown: next + SHOWN });
      place.children[next].focus(); // not lost with the button, for those who use the keyboard
    };
    place.append(more);
  }
}

function choose(change) {
  Object.assign(chosen, { shown: SHOWN }, change);
  const rows = data.groups.filter(inView).flatMap((group) => group.rows);
  for (const [name, label] of data.filters) {
    const chip = byId(`filter-${name}`), count = rows.filter((row) => row.is.includes(name)).length;
    chip.setAttribute("aria-pressed", name === chosen.filter);
    chip.textContent = `${label} (${count})`;
    chip.disabled = !count && name !== chosen.filter; // one that is on can be turned off
  }
  byId("step").value = chosen.step;
  byId("prompt").value = chosen.prompt;
  showGroups();
}

function select(id, all, options) {
  const node = el("select", { id, "aria-label": id }, el("option", { value: "" }, all),
    options.map(([value, label]) => el("option", { value }, label)));
  node.onchange = () => choose({ [id]: node.value });
  return node;
}

function showCompletions() {
  const { groups, recorded, filters } = data;
  byId("groups-note").textContent = groups.length ?
    "Answers to the same prompt side by side: blue ones became more likely, orange ones less, the stronger the colour." +
    (groups.length < recorded ? ` Shown are ${groups.length} of ${recorded} recorded groups; completions.jsonl has all.` : "") :
    "None were recorded (log_groups).";
  if (!groups.length) return;
  const steps = [...new Set(groups.map((group) => group.step))].reverse();
  const prompts = new Map();
  for (const group of groups) {
    const known = prompts.get(promptOf(group)) || { count: 0, title: text(group.prompt)[0] };
    prompts.set(promptOf(group), { ...known, count: known.count + 1 });
  }
  const often = [...prompts].sort((a, b) => b[1].count - a[1].count).map(([value, { count, title }]) => {
    const line = title.slice(ownFrom).replace(/\s+/g, " ");
    return [value, `${count} × ${line.length > 60 ? `${line.slice(0, 60)} …` : line}`];
  });
  const chips = filters.map(([name, , what]) => {
    const chip = el("button", { type: "button", id: `filter-${name}`, title: what });
    chip.onclick = () => choose({ filter: chosen.filter === name ? "" : name });
    return chip;
  });
  byId("controls").append(select("step", "all steps, latest first", steps.map((step) => [String(step), `step ${step}`])),
    select("prompt", "all prompts", often), ...chips);
  choose({});
}

// ---- All of it

byId("name").textContent = data.name;
byId("written").textContent = `written ${data.written}`;
data.panels.forEach(showPanel);
data.setup.forEach((each) => byId("setup").append(table(each)));
showVerdict(data.verdict);
showCompletions();
const long = data.panels.some((panel) => panel.lines.some((line) => line.steps.length >= SMOOTH_FROM));
byId("curves-note").textContent = [
  matchMedia("(pointer: coarse)").matches ? "" : "Drag over a curve to zoom into steps.",
  long ? "Thin: each step; thick: its moving mean." : "",
  data.resumes.length ? "Dashed: the run was resumed there." : "",
  data.thinned,
].filter(Boolean).join(" ");
const drawn = drawCurves(data.panels, data.resumes, byId("reset"));
