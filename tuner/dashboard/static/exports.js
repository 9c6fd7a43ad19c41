// What can be taken along: the document as JSON, every level as CSV, a trial as launch.yaml.

import { save } from "./dom.js";
import { launchFile } from "./launch.js";

function field(value) {
  if (value === null || value === undefined) return "";
  let text = typeof value === "object" ? JSON.stringify(value) : String(value);
  // A spreadsheet runs what begins like a formula.
  if (typeof value === "string" && /^[=+\-@\t\r]/.test(text)) text = `'${text}`;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

// One line for each trial and concurrency; trials without a level have one line.
export function csv(study) {
  const paths = [...new Set(study.trials.flatMap((trial) => Object.keys(trial.config)))];
  const names = study.metrics.map((metric) => metric.name).filter((name) => study.trials.some((trial) => study.rows(trial).some((row) => study.value(row, name) !== null)));
  const head = ["trial", "role", "of", "state", "failure", "concurrency", "n", "on_front", "feasible", "times_baseline", ...names.flatMap((name) => [name, `${name}_low`, `${name}_high`]), ...paths];
  const lines = [head];
  for (const trial of study.trials) {
    const fixed = [trial.trial, trial.role, trial.of, trial.state, trial.failure?.kind];
    const config = paths.map((path) => trial.config[path]);
    const rows = study.rows(trial);
    for (const row of rows.length > 0 ? rows : [null]) {
      const point = row === null ? null : study.point(trial.trial, row.concurrency);
      const values = names.flatMap((name) => row === null ? [null, null, null] : [study.value(row, name), ...(study.interval(row, name) ?? [null, null])]);
      lines.push([...fixed, row?.concurrency, row?.n, point?.front, point?.feasible, point?.speedup, ...values, ...config]);
    }
  }
  return `${lines.map((line) => line.map(field).join(",")).join("\r\n")}\r\n`;
}

export function exportsOf(study) {
  const best = study.derived.recommendation && study.byNumber.get(study.derived.recommendation.trial);
  return [
    ["CSV", "one line per trial and load", () => save(`${study.name}.csv`, "text/csv", csv(study))],
    ["JSON", "everything on this page", () => save(`${study.name}.json`, "application/json", JSON.stringify(
      { study: study.about, trials: study.trials, derived: study.derived, metrics: study.metrics }, null, 1))],
    best && ["launch.yaml", `the recommended trial ${best.trial}`, () => save("launch.yaml", "application/yaml", study.about.launch ?? launchFile(study, best))],
  ].filter(Boolean);
}
