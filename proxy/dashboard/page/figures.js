// What the page says, worked out of the router's counts. No document, no network: only arithmetic and words.
"use strict";

/** So few turns on either side tell nothing. */
export const ENOUGH = 5;
/** Medians that are closer than this are not told apart. */
const CLEAR = 1.1;
/** Below this share of turns, reuse is too rare to matter. */
const OFTEN = 0.1;

export const OUTCOMES = [
  "hit", "partial", "first", "none", "diverged", "expired", "stale", "failed", "unsupported", "off",
];
const REUSED = ["hit", "partial"];
export const FATES = ["reused", "recomputed", "new", "unknown"];

export const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);

/**
 * Where the median lies, by the counts of a histogram's buckets.
 *
 * `bounds` are the upper bounds of all buckets but the last, which has none. Within its bucket the median is
 * interpolated, as Prometheus does. Gives {bucket, seconds}; seconds is Infinity in the last bucket; null without
 * turns.
 */
export function median(bounds, counts) {
  const half = sum(counts) / 2;
  if (half === 0) return null;
  let before = 0;
  for (let bucket = 0; bucket < bounds.length; bucket++) {
    if (before + counts[bucket] >= half) {
      const low = bucket === 0 ? 0 : bounds[bucket - 1];
      return { bucket, seconds: low + (bounds[bucket] - low) * ((half - before) / counts[bucket]) };
    }
    before += counts[bucket];
  }
  return { bucket: bounds.length, seconds: Infinity };
}

/** The counts of `now` without those of `then`, an earlier answer of the same router. */
export function since(then, now) {
  const turns = new Map(then.turns.map((one) => [`${one.outcome} ${one.reason}`, one.turns]));
  const contexts = new Map(then.ttft.contexts.map((one) => [one.context, one]));
  const less = (counts, before) => counts.map((count, bucket) => count - (before?.[bucket] ?? 0));
  return {
    turns: now.turns
      .map((one) => ({ ...one, turns: one.turns - (turns.get(`${one.outcome} ${one.reason}`) ?? 0) }))
      .filter((one) => one.turns !== 0),
    prompt_tokens: Object.fromEntries(FATES.map((fate) => [fate, now.prompt_tokens[fate] - then.prompt_tokens[fate]])),
    ttft: {
      bounds: now.ttft.bounds,
      contexts: now.ttft.contexts
        .map((one) => ({
          context: one.context,
          reused: less(one.reused, contexts.get(one.context)?.reused),
          plain: less(one.plain, contexts.get(one.context)?.plain),
        }))
        .filter((one) => sum(one.reused) + sum(one.plain) !== 0),
    },
  };
}

/** Whether `now` is of another start of the router than `then`: a count went down. */
export function restarted(then, now) {
  const less = since(then, now);
  const gone = then.turns.some((one) => !now.turns.some((o) => o.outcome === one.outcome && o.reason === one.reason));
  return gone || less.turns.some((one) => one.turns < 0) || FATES.some((fate) => less.prompt_tokens[fate] < 0);
}

/** Turns and shares by outcome, in the usual order, each with its reasons. */
export function mix(turns) {
  const all = sum(turns.map((one) => one.turns));
  const outcomes = [...new Set([...OUTCOMES, ...turns.map((one) => one.outcome)])];
  return outcomes.map((outcome) => {
    const own = turns.filter((one) => one.outcome === outcome);
    const count = sum(own.map((one) => one.turns));
    const reasons = own.map((one) => ({ reason: one.reason, turns: one.turns })).sort((a, b) => b.turns - a.turns);
    return { outcome, turns: count, share: all ? count / all : 0, reasons };
  }).filter((one) => one.turns > 0);
}

/** Turns and medians by context length, with reuse and without, and how the two compare. */
export function byContext(ttft) {
  return ttft.contexts.map((one) => {
    const side = (counts) => ({ turns: sum(counts), median: median(ttft.bounds, counts) });
    const reused = side(one.reused);
    const plain = side(one.plain);
    return { context: one.context, reused, plain, is: compared(reused, plain) };
  });
}

/** "sooner", "later" or "same", with reuse; "unknown" with too few turns. */
function compared(reused, plain) {
  if (reused.turns < ENOUGH || plain.turns < ENOUGH) return "unknown";
  if (reused.median.bucket === plain.median.bucket) return "same";
  const ratio = plain.median.seconds / reused.median.seconds;
  if (ratio >= CLEAR) return "sooner";
  return ratio <= 1 / CLEAR ? "later" : "same";
}

/** One plain sentence or two: does reuse pay here? Gives {answer, text}. */
export function verdict({ turns, prompt_tokens: tokens, ttft }) {
  const all = sum(turns.map((one) => one.turns));
  const count = (outcomes) => sum(turns.filter((one) => outcomes.includes(one.outcome)).map((one) => one.turns));
  const reusing = count(REUSED);
  if (all > 0 && count(["off"]) === all) return { answer: "unknown", text: "Reuse is switched off." };

  const rows = byContext(ttft);
  // Where it happens most, and of such the longest.
  const best = (is) => rows.filter((row) => row.is === is).reverse().sort((a, b) => b.reused.turns - a.reused.turns)[0];
  const [sooner, later, same] = [best("sooner"), best("later"), best("same")];
  const saved = `${saving(tokens)} ${spelled(reusing)} of ${spelled(all)} turns reused something.`;
  if (sooner && later) {
    const text = `Reuse pays at some context lengths and not at others: ${sides(sooner)}, but ${sides(later)}. ${saved}`;
    return { answer: "mixed", text };
  }
  if (sooner && reusing < OFTEN * all) {
    return { answer: "rarely", text: `Reuse pays where it happens, but that is rare: ${sides(sooner)}. ${saved}` };
  }
  if (sooner) return { answer: "yes", text: `Reuse pays here: ${sides(sooner)}. ${saved}` };
  if (later) return { answer: "no", text: `Reuse does not pay here: ${sides(later)}. ${saved}` };
  if (same) return { answer: "no", text: `Reuse makes no clear difference here: ${sides(same)}. ${saved}` };
  return { answer: "unknown", text: `Not enough turns yet. ${missing(rows)}` };
}

function sides({ context, reused, plain }) {
  const [on, off] = [seconds(reused.median.seconds), seconds(plain.median.seconds)];
  return `at ${contextWords(context)} tokens the median time to the first token is ${on} with reuse and ${off} without`;
}

function saving(tokens) {
  const all = sum(FATES.map((fate) => tokens[fate]));
  return all ? `${percent(tokens.reused / all)} of prompt tokens were not computed again.` : "";
}

function missing(rows) {
  const needed = `To compare, it takes ${ENOUGH} streams with reuse and ${ENOUGH} without, of about the same length`;
  const near = [...rows].sort(
    (a, b) => Math.min(b.reused.turns, b.plain.turns) - Math.min(a.reused.turns, a.plain.turns) ||
      b.reused.turns + b.plain.turns - a.reused.turns - a.plain.turns,
  )[0];
  if (!near) return `${needed}; there were none.`;
  const so = `at ${contextWords(near.context)} tokens there were ${spelled(near.reused.turns)} and ${spelled(near.plain.turns)}`;
  return `${needed}; ${so}.`;
}

/** "4k-8k" as people read it. */
export function contextWords(context) {
  return context.replace(/^<=/, "up to ").replace(/^>/, "over ").replace("-", " to ");
}

export const spelled = (number) => number.toLocaleString("en");

export function percent(share) {
  const hundredths = share * 100;
  return `${hundredths > 0 && hundredths < 10 ? Math.max(0.1, hundredths).toFixed(1) : hundredths.toFixed(0)} %`;
}

/** A time for people: "63 ms", "0.76 s", "12.3 s", "4 min 10 s". */
export function seconds(time) {
  if (time === Infinity) return "more than was measured";
  if (time === 0) return "0 s";
  if (time < 0.0995) return `${(time * 1000).toFixed(time < 0.00995 ? 1 : 0)} ms`;
  if (time < 9.995) return `${time.toFixed(2)} s`;
  if (time < 99.95) return `${time.toFixed(1)} s`;
  const whole = Math.round(time);
  return `${Math.floor(whole / 60)} min ${whole % 60} s`;
}

/** How a worker is, in words, and whether that is good. */
export function state(worker) {
  const words = [];
  if (worker.down) words.push("down");
  else if (!worker.up) words.push("not asked yet");
  if (worker.figures.breaker_open) words.push("keeps failing: sent nothing for a while");
  if (worker.draining) words.push("drains: no new work");
  return words.length ? { good: false, text: words.join(", ") } : { good: true, text: "up" };
}

/** The newest conversations, each with its outcomes, from the newest turns. The newest first. */
export function conversations(turns) {
  const found = new Map();
  turns.forEach((turn, index) => {
    // A turn that named no conversation stands alone.
    const key = turn.conversation || `turn ${index}`;
    const known = found.get(key);
    if (known) known.outcomes.unshift(turn.outcome);
    else found.set(key, { newest: turn, outcomes: [turn.outcome] });
  });
  return [...found.values()];
}
