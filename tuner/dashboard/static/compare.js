// Two trials side by side: what differs in their configurations, and how sure the difference in speed is.

import { el, symbol } from "./dom.js";
import { number, percent, shown } from "./format.js";
import { isBetter } from "./model.js";
import { panel, trialLink } from "./parts.js";

// 97.5 % quantiles of Student's t for 1 … 30 degrees of freedom.
const T = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131, 2.12,
  2.11, 2.101, 2.093, 2.086, 2.08, 2.074, 2.069, 2.064, 2.06, 2.056, 2.052, 2.048, 2.045, 2.042];

function quantile(freedom) {
  return T[Math.min(freedom, T.length) - 1];
}

// Ratio of two measurements with its interval: half-widths of the logarithms add in quadrature (delta method).
export function ratio(a, b, intervalA, intervalB) {
  const log = Math.log(b / a);
  if (intervalA === null || intervalB === null || intervalA[0] <= 0 || intervalB[0] <= 0) return { ratio: Math.exp(log), low: null, high: null };
  const half = ([low, high]) => (Math.log(high) - Math.log(low)) / 2;
  const width = Math.hypot(half(intervalA), half(intervalB));
  return { ratio: Math.exp(log), low: Math.exp(log - width), high: Math.exp(log + width) };
}

// Mean ratio over loads that both measured, paired by load: t interval of the differences of logarithms.
export function paired(pairs) {
  const logs = pairs.map(([a, b]) => Math.log(b / a));
  const n = logs.length;
  const mean = logs.reduce((sum, value) => sum + value, 0) / n;
  if (n < 2) return { ratio: Math.exp(mean), low: null, high: null, n };
  const spread = Math.sqrt(logs.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (n - 1) / n) * quantile(n - 1);
  return { ratio: Math.exp(mean), low: Math.exp(mean - spread), high: Math.exp(mean + spread), n };
}

function change({ ratio: value, low, high }) {
  const signed = (share) => `${share >= 0 ? "+" : "−"}${percent(Math.abs(share), 1)}`;
  return low === null ? signed(value - 1) : `${signed(value - 1)} [${signed(low - 1)} … ${signed(high - 1)}]`;
}

function verdict(goal, result) {
  if (result.low === null) return ["dim", "no interval"];
  if (result.low <= 1 && result.high >= 1) return ["dim", "not told apart"];
  return isBetter(goal, result.ratio, 1) ? ["good", "better"] : ["bad", "worse"];
}

export function comparison(context, a, b) {
  const { study } = context;
  const metrics = [...new Set([...study.objectives.map((o) => o.metric), "ttft_ms_p50", "accept_length"])];
  const rows = metrics.flatMap((name) => metricRows(study, name, a, b));
  const heading = (trial) => [trialLink(context, trial), "\u2002", symbol(trial.kind), trial.label];
  return panel("Compare", el("a", { href: context.href("trials") }, "Close"),
    el("div", { className: "body halves" },
      el("div", { className: "scroll" }, el("h3", null, "Configuration: what differs"), diffTable(a, b, heading)),
      el("div", { className: "scroll" }, el("h3", null, `Measured: from #${a.trial} to #${b.trial}`), el("table", { id: "paired" },
        el("thead", null, el("tr", null, ["metric", "in flight", `#${a.trial}`, `#${b.trial}`, "change, 95 % interval", ""].map((text, i) => el("th", { className: i === 0 || i === 5 ? "l" : "" }, text)))),
        el("tbody", null, rows)))),
    el("p", { className: "note" }, "Per load, the interval combines those of both trials. “All loads” pairs the trials load by load (same prompts, same order) and takes Student's t over the logarithms of the ratios."));
}

function metricRows(study, name, a, b) {
  const goal = study.metric(name).goal;
  const pairs = a.points.map((row) => [study.point(a.trial, row[0]), study.point(b.trial, row[0])])
    .filter(([x, y]) => y !== null && study.value(x, name) > 0 && study.value(y, name) > 0);
  const line = (where, left, right, result) => {
    const [tone, words] = verdict(goal, result);
    return el("tr", null, el("td", { className: "l" }, name), el("td", null, where), el("td", null, left), el("td", null, right),
      el("td", { className: "delta" }, change(result)), el("td", { className: `l ${tone}` }, words));
  };
  const each = pairs.map(([x, y]) => line(String(x.concurrency), number(study.value(x, name)), number(study.value(y, name)),
    ratio(study.value(x, name), study.value(y, name), study.interval(x, name), study.interval(y, name))));
  if (pairs.length < 2) return each;
  const all = paired(pairs.map(([x, y]) => [study.value(x, name), study.value(y, name)]));
  return [...each, el("tr", { className: "chosen" }, ...line("all loads", "", "", all).childNodes)];
}

export function diffTable(a, b, heading) {
  const paths = [...new Set([...Object.keys(a.config), ...Object.keys(b.config)])];
  const text = (trial, path) => (path in trial.config ? shown(trial.config[path]) : null);
  const different = paths.filter((path) => text(a, path) !== text(b, path));
  const cell = (value) => (value === null ? el("td", { className: "l absent" }, "absent") : el("td", { className: "l wrap mono" }, value));
  return el("table", { id: "diff" },
    el("thead", null, el("tr", null, el("th", { className: "l" }, "field"), el("th", { className: "l" }, heading(a)), el("th", { className: "l" }, heading(b)))),
    el("tbody", null, different.length === 0 ? el("tr", null, el("td", { className: "l dim", colSpan: 3 }, "the same configuration")) : null,
      different.map((path) => el("tr", null, el("td", { className: "l mono" }, path), cell(text(a, path)), cell(text(b, path))))));
}
