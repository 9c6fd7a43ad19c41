// Pieces that several views show: a configuration's name, a point in detail, what is not there.

import { command, el, symbol } from "./dom.js";
import { duration, number, plural, times } from "./format.js";
import { launchCommand } from "./launch.js";
import { valueWithUnit } from "./chart.js";

export const KINDS = {
  none: "no speculation", dflash: "DFlash chain", ddtree: "DDTree", policy: "policy by load",
};

export function kindTitle(kind) {
  return KINDS[kind] ?? kind;
}

export function trialLink(context, trial, ...more) {
  return el("a", { href: context.href("trial", trial.trial) }, ...(more.length > 0 ? more : [`#${trial.trial}`]));
}

export function named(trial) {
  return [symbol(trial.kind), trial.label];
}

export function statePill(trial, plain = false) {
  const words = trial.failure !== null && trial.state === "failed" ? trial.failure.kind : trial.state;
  return el("span", { className: `pill ${plain ? "plain " : ""}${trial.state}` }, words);
}

export function emptyView(title, text) {
  return el("div", { className: "panel empty" }, el("strong", null, title), text);
}

export function pointTags(point) {
  const tag = (text, kind = "") => el("span", { className: `tag ${kind}` }, text);
  return [
    point.front && tag("on the front", "hot"), point.baseline && tag("baseline"),
    point.confirmed && tag("confirmed"), !point.feasible && tag("misses a constraint", "bad"),
    !point.front && point.feasible && tag("dominated"), point.trial.synthetic && tag("synthetic", "bad"),
    point.tieCount > 0 && tag(`tied with ${point.ties.slice(0, 4).map((t) => `#${t}`).join(", ")}${point.tieCount > 4 ? ` and ${point.tieCount - 4} more` : ""}`),
  ].filter(Boolean);
}

// The metrics worth a line: objectives, constraints, what explains them.
export function mainMetrics(study) {
  return [...new Set([
    ...study.objectives.map((o) => o.metric), ...study.about.constraints.map((c) => c.metric),
    "ttft_ms_p50", "accept_length",
  ])];
}

export function pointDetail(context, point) {
  const { study } = context;
  const rows = mainMetrics(study).map((name) => el("tr", null,
    el("td", null, name), el("td", null, valueWithUnit(study, name, study.value(point, name), study.interval(point, name)))));
  return [
    el("div", { className: "title" }, symbol(point.trial.kind), trialLink(context, point.trial, `Trial ${point.trial.trial}`),
      el("span", { className: "dim" }, `\u2002at ${plural(point.concurrency, "request")} in flight`)),
    el("div", { className: "label" }, point.trial.label),
    el("div", { className: "flags" }, pointTags(point)),
    el("table", null, el("tbody", null, rows,
      el("tr", null, el("td", null, "× baseline"), el("td", null, times(point.speedup))),
      el("tr", null, el("td", null, "requests"), el("td", null, number(point.n).replace(".00", "").replace(".0", ""))))),
    el("h3", null, "Serve it"),
    command(launchCommand(study, point.trial)),
  ];
}

export function failureText(study, trial) {
  return `${trial.failure.kind} at ${trial.failure.stage}: ${study.failures[trial.failure.kind] ?? ""}`;
}

export function spent(trial) {
  const seconds = Object.values(trial.seconds).reduce((sum, value) => sum + value, 0);
  return seconds > 0 ? duration(seconds) : "–";
}

export function panel(title, controls, ...children) {
  return el("section", { className: "panel" },
    el("header", null, el("h2", null, title), controls && el("div", { className: "controls" }, controls)), ...children);
}
