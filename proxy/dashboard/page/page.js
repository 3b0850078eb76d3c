// Asks for the figures every two seconds while somebody looks, and shows them.
"use strict";

import * as figures from "./figures.js";

const EVERY_MS = 2000;
const PATIENCE_MS = 5000;
const WINDOW_SECONDS = 300;
const SHOWN_CONVERSATIONS = 20;

const FATE_WORDS = {
  reused: "reused: not computed again",
  recomputed: "computed again, though an earlier turn had",
  new: "new: never computed before",
  unknown: "not known whether it was computed before",
};

/** Earlier answers, the oldest first: what the last minutes are told from. */
let earlier = [];
let answer = null;
let answeredAt = null;
let silentSince = null;
let timer = 0;

const at = (id) => document.getElementById(id);
const clock = (date) => date.toLocaleTimeString("en-GB");

async function ask() {
  clearTimeout(timer);
  try {
    const response = await fetch("dashboard/data", { signal: AbortSignal.timeout(PATIENCE_MS), cache: "no-store" });
    if (!response.ok) throw new Error(`status ${response.status}`);
    take(await response.json());
    silentSince = null;
  } catch {
    silentSince ??= new Date();
  }
  show();
  clearTimeout(timer);
  if (!document.hidden) timer = setTimeout(ask, EVERY_MS);
}

function take(next) {
  if (answer && figures.restarted(answer, next)) earlier = [];
  answer = next;
  answeredAt = new Date();
  earlier.push(next);
  // The newest that is old enough is where the window begins.
  while (earlier.length > 1 && earlier[1].at <= next.at - WINDOW_SECONDS) earlier.shift();
}

function show() {
  const alert = at("alert");
  alert.hidden = silentSince === null;
  if (silentSince !== null) {
    const shown = answeredAt ? ` What is shown is from ${clock(answeredAt)}.` : "";
    say(alert, `The router does not answer since ${clock(silentSince)}. It is asked every 2 s.${shown}`);
  }
  if (answer === null) return say(at("state"), "Nothing is known yet.");

  const begin = earlier[0];
  const seen = Math.round(answer.at - begin.at);
  say(at("last"), seen < WINDOW_SECONDS ? `the last 5 minutes (seen: ${figures.seconds(seen)})` : `the last ${Math.round(seen / 60)} minutes`);
  const last = document.querySelector("input[name=window]:checked").value === "last";
  const counted = last ? figures.since(begin, answer) : answer;
  say(at("state"), stateWords());
  say(at("version"), answer.version);
  const verdict = figures.verdict(counted);
  at("verdict").dataset.answer = verdict.answer;
  // A number and its unit stay on one line.
  say(at("verdict"), verdict.text.replace(/(\d) (?=%|ms|s\b|min\b)/g, "$1\u00a0"));
  showTtft(counted.ttft);
  showOutcomes(counted.turns);
  showTokens(counted.prompt_tokens);
  showRetained();
  showWorkers();
  showNewest();
}

function stateWords() {
  const up = answer.workers.filter((worker) => worker.up).length;
  const ready = answer.draining ? "About to end" : answer.ready ? "Ready" : "Not ready";
  const turns = `${count(answer.running, "turn")} running, ${figures.spelled(answer.queued)} waiting`;
  return `${ready} · ${up} of ${answer.workers.length} workers up · ${turns} · as of ${clock(answeredAt)}`;
}

function showTtft({ bounds, contexts }) {
  const rows = figures.byContext({ bounds, contexts });
  const finite = rows.flatMap((row) => [row.reused.median, row.plain.median]).filter((m) => m && m.seconds !== Infinity);
  const longest = Math.max(...finite.map((m) => m.seconds));
  const side = ({ turns, median }, kind) =>
    median === null
      ? [text("–", "of")]
      : [text(figures.seconds(median.seconds), "number"), text(` ${count(turns, "turn")}`, "of"), bar(median.seconds / longest, kind)];
  const words = ({ is, reused, plain }) => {
    const ratio = (a, b) => `${(a.median.seconds / b.median.seconds).toFixed(1)} times`;
    if (is === "sooner") return [text(`${ratio(plain, reused)} as fast`, "good")];
    if (is === "later") return [text(`${ratio(reused, plain)} as slow`, "bad")];
    return [text(is === "same" ? "no different" : "not known: too few turns", "of")];
  };
  fill("ttft", rows.map((row) => [
    [text(figures.contextWords(row.context))], side(row.reused, "reuse"), side(row.plain), words(row),
  ]));
}

function showOutcomes(turns) {
  fill("outcomes", figures.mix(turns).map(({ outcome, turns: own, share, reasons }) => [
    [text(outcome)],
    [text(figures.spelled(own), "number")],
    [text(figures.percent(share), "number"), bar(share, outcome === "hit" || outcome === "partial" ? "reuse" : "")],
    [text(reasons.map(({ reason, turns: some }) => (reasons.length > 1 ? `${reason} ${figures.spelled(some)}` : reason)).join(", "), "of")],
  ]));
}

function showTokens(tokens) {
  const all = figures.sum(figures.FATES.map((fate) => tokens[fate]));
  fill("tokens", all === 0 ? [] : figures.FATES.map((fate) => [
    [text(FATE_WORDS[fate])],
    [text(figures.spelled(tokens[fate]), "number")],
    [text(figures.percent(tokens[fate] / all), "number"), bar(tokens[fate] / all, fate === "reused" ? "reuse" : "")],
  ]));
}

function showRetained() {
  const part = (share, kind) =>
    share === null ? [text("not known", "of")] : [text(figures.percent(share), "number"), bar(share, kind)];
  fill("retained", answer.workers.filter((worker) => worker.role === "decode").map(({ worker, figures: own }) => [
    [text(address(worker), "name")],
    [text(figures.spelled(own.retained_entries), "number")],
    [text(figures.spelled(own.retained_tokens), "number"),
      text(own.kv_capacity_tokens === null ? "" : ` of ${figures.spelled(own.kv_capacity_tokens)}`, "of")],
    part(own.retained_share, "reuse"),
    part(own.kv_usage, ""),
  ]));
}

function showWorkers() {
  fill("workers", answer.workers.map((worker) => {
    const { good, text: words } = figures.state(worker);
    const started = worker.figures.started_at;
    return [
      [text(address(worker.worker), "name")],
      [text(worker.role)],
      [text(words, good ? "good" : "bad")],
      [text(figures.spelled(worker.figures.in_flight), "number")],
      [started === null ? text("not known", "of") : time(started, "date")],
    ];
  }));
}

function showNewest() {
  const shown = figures.conversations(answer.newest).slice(0, SHOWN_CONVERSATIONS);
  const known = (value, words) => [value === null ? text("–", "of") : text(words(value), "number")];
  fill("newest", shown.map(({ newest: turn, outcomes }) => [
    [turn.conversation ? text(turn.conversation, "", "code") : text("no id", "of")],
    [text(outcomes.join(", ")), text(` ${turn.reason}`, "of")],
    [text(figures.spelled(turn.turn), "number")],
    [time(turn.at)],
    known(turn.prompt_tokens, figures.spelled),
    [text(figures.spelled(turn.reused_tokens), "number")],
    known(turn.ttft_seconds, figures.seconds),
    [text(figures.seconds(turn.seconds), "number")],
    [text(String(turn.status), turn.status === 200 ? "number" : "number bad")],
    [text([turn.prefill, turn.decode].filter(Boolean).map(address).join(", ") || "–", "of name")],
  ]));
}

/** Put rows into a table; nothing is touched if they are as before, so that what a reader has selected stays so. */
function fill(id, rows) {
  const table = at(id);
  const heads = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
  const body = document.createElement("tbody");
  body.setAttribute("role", "rowgroup");
  for (const cells of rows.length ? rows : [null]) {
    const row = body.insertRow();
    row.setAttribute("role", "row");
    if (cells === null) {
      const cell = row.insertCell();
      cell.setAttribute("role", "cell");
      cell.colSpan = heads.length;
      cell.append(text("nothing yet", "of"));
      continue;
    }
    cells.forEach((parts, column) => {
      const cell = document.createElement(column === 0 ? "th" : "td");
      cell.setAttribute("role", column === 0 ? "rowheader" : "cell");
      if (column === 0) cell.scope = "row";
      else cell.dataset.head = heads[column];
      cell.append(...parts);
      row.append(cell);
    });
  }
  if (!body.isEqualNode(table.tBodies[0])) table.tBodies[0].replaceWith(body);
}

function text(words, kind = "", tag = "span") {
  const element = document.createElement(tag);
  element.className = kind;
  element.textContent = words;
  return element;
}

/** A picture of a share that the text beside it tells too. */
function bar(share, kind = "") {
  const element = text("", `bar ${kind}`.trim());
  element.setAttribute("aria-hidden", "true");
  element.style.width = `${Math.min(100, Math.max(0, share * 100)).toFixed(1)}%`;
  return element;
}

function time(seconds, also) {
  const date = new Date(seconds * 1000);
  const element = text(also ? `${date.toLocaleDateString("sv-SE")} ${clock(date)}` : clock(date), "number", "time");
  element.dateTime = date.toISOString();
  return element;
}

const address = (worker) => worker.replace(/^http:\/\//, "");
const count = (number, noun) => `${figures.spelled(number)} ${noun}${number === 1 ? "" : "s"}`;

function say(element, words) {
  // Not otherwise: what is set anew is read out anew.
  if (element.textContent !== words) element.textContent = words;
}

document.querySelectorAll("input[name=window]").forEach((input) => input.addEventListener("change", show));
document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : ask()));
ask();
