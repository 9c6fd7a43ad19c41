// Every trial in a table: sort by any column, filter by words and values, pick two to compare.

import { comparison } from "./compare.js";
import { el, fill, say, symbol, tick } from "./dom.js";
import { number, times } from "./format.js";
import { emptyView, spent, statePill, trialLink } from "./parts.js";

const PAGE = 100;
const CONDITION = /^([A-Za-z_][\w.]*)(?:@(\d+))?(<=|>=|=|<|>)(.+)$/;

export class TableView {
  constructor(context) {
    this.context = context;
    this.options = context.keep("table", { sort: "trial", down: false, query: "", hidden: true });
    const asked = new URLSearchParams(context.rest);
    if (asked.has("q")) this.options.query = asked.get("q");
    this.chosen = (asked.get("compare") ?? "").split(",").filter(Boolean).map(Number).filter((number_) => context.study.byNumber.has(number_)).slice(0, 2);
    this.shown = PAGE;
    this.search = el("input", { type: "search", placeholder: "dflash failed output_tok_s@8>900", "aria-label": "Filter trials", value: this.options.query,
      on: { input: () => { this.options.query = this.search.value; this.shown = PAGE; this.list(); } } });
    this.count = el("span", { className: "dim", id: "count", role: "status" });
    this.compareButton = el("button", { type: "button", disabled: true, on: { click: () => context.go("trials", `compare=${this.chosen.join(",")}`) } }, "Compare");
    this.toolbar = el("div", { className: "toolbar" }, this.search, this.count, el("span", { className: "spacer" }),
      tick("Refused points", !this.options.hidden, (value) => { this.options.hidden = !value; this.list(); }),
      this.compareButton);
    this.head = el("thead");
    this.rows = el("tbody");
    this.more = el("div", { className: "more" });
    this.compared = el("div");
    this.node = el("div", { className: "stack" }, this.compared, el("section", { className: "panel" }, this.toolbar,
      el("div", { className: "scroll" }, el("table", { id: "trials" }, this.head, this.rows)), this.more,
      el("p", { className: "note" }, "Words are looked for in number, role, state, failure and configuration; metric@load<value, such as tpot_ms_p50@1<5, and path=value, such as draft.layers>2, compare.")));
  }

  show() {
    this.update();
  }

  update() {
    const { study } = this.context;
    if (study.trials.length === 0) {
      fill(this.node, emptyView("No trial is recorded yet", "Trials appear here as they end."));
      return;
    }
    const [a, b] = this.chosen.map((number_) => study.byNumber.get(number_));
    fill(this.compared, a && b && new URLSearchParams(this.context.rest).has("compare") ? comparison(this.context, a, b) : []);
    this.columns = this.makeColumns();
    this.list();
  }

  makeColumns() {
    const { study } = this.context;
    const at = (trial, level, name) => study.value(study.at(trial, level), name);
    const measured = (name, level, interval) => ({
      key: `${name}@${level}`, title: name, small: `${study.metric(name).unit}, at ${level}`, of: (trial) => at(trial, level, name),
      cell: (trial) => {
        const bounds = interval ? study.interval(study.at(trial, level), name) : null;
        return [number(at(trial, level, name)), bounds && el("span", { className: "iv" }, `${number(bounds[0])}–${number(bounds[1])}`)];
      },
    });
    const load = study.about.pick.load ?? study.levels.at(-1);
    const text = (key, title, of, cell) => ({ key, title, left: true, of, cell });
    return [
      { key: "trial", title: "trial", of: (trial) => trial.trial, cell: (trial) => trialLink(this.context, trial) },
      text("role", "role", (trial) => trial.role, (trial) => (trial.of === null ? trial.role : `${trial.role} of #${trial.of}`)),
      text("state", "state", (trial) => `${trial.state} ${trial.failure?.kind ?? ""}`, (trial) => statePill(trial, true)),
      text("label", "configuration", (trial) => trial.label, (trial) => [symbol(trial.kind), trial.label]),
      ...study.objectives.map((objective) => measured(objective.metric, objective.at, true)),
      ...study.levels.slice(0, 6).map((level) => ({
        key: `speedup@${level}`, title: "× baseline", small: `at ${level}`,
        of: (trial) => study.at(trial, level)?.speedup ?? null, cell: (trial) => times(study.at(trial, level)?.speedup),
      })),
      ...study.about.constraints.map((constraint) => measured(constraint.metric, constraint.at ?? load, false)),
      measured("accept_length", load, false),
      { key: "seconds", title: "time", of: (trial) => Object.values(trial.seconds).reduce((sum, value) => sum + value, 0), cell: spent },
    ];
  }

  list() {
    const { study } = this.context;
    const passes = filter(study, this.options.query);
    const trials = study.trials.filter((trial) => (!this.options.hidden || trial.state !== "infeasible") && passes(trial));
    const column = this.columns.find(({ key }) => key === this.options.sort) ?? this.columns[0];
    const order = this.options.down ? -1 : 1;
    trials.sort((a, b) => compareValues(column.of(a), column.of(b), order) || a.trial - b.trial);
    fill(this.count, `${trials.length} of ${study.trials.length}`);
    fill(this.head, el("tr", null, el("th", null, el("span", { className: "unseen" }, "compare")), this.columns.map((each) => this.headCell(each))));
    const best = study.derived.recommendation?.trial;
    fill(this.rows, trials.slice(0, this.shown).map((trial) => el("tr", { className: trial.trial === best ? "chosen" : "" },
      el("td", null, this.box(trial)), this.columns.map((each) => el("td", { className: each.left ? "l" : "" }, each.cell(trial))))));
    fill(this.more, trials.length > this.shown ? el("button", { type: "button", on: { click: () => { this.shown += PAGE; this.list(); } } }, `Show ${Math.min(PAGE, trials.length - this.shown)} more`) : []);
    this.compareButton.disabled = this.chosen.length !== 2;
    this.compareButton.textContent = this.chosen.length === 2 ? `Compare #${this.chosen[0]} and #${this.chosen[1]}` : "Compare (pick two)";
  }

  headCell(column) {
    const sorted = column.key === this.options.sort;
    return el("th", { scope: "col", className: column.left ? "l" : "", "aria-sort": sorted ? (this.options.down ? "descending" : "ascending") : null },
      el("button", { type: "button", on: { click: () => this.sortBy(column, sorted) }, data: { key: column.key } }, column.title), column.small && el("small", null, column.small));
  }

  sortBy(column, sorted) {
    this.options.down = sorted ? !this.options.down : false;
    this.options.sort = column.key;
    this.list();
    say(`Sorted by ${column.title}, ${this.options.down ? "descending" : "ascending"}`);
    [...this.head.querySelectorAll("button")].find((button) => button.dataset.key === column.key)?.focus();
  }

  box(trial) {
    const box = el("input", { type: "checkbox", checked: this.chosen.includes(trial.trial), "aria-label": `Compare trial ${trial.trial}`, on: { change: () => {
      this.chosen = box.checked ? [...this.chosen, trial.trial].slice(-2) : this.chosen.filter((number_) => number_ !== trial.trial);
      this.list();
      this.rows.querySelector(`input[aria-label="Compare trial ${trial.trial}"]`)?.focus();
    } } });
    return box;
  }

  dispose() {}
}

// What is missing comes last, whichever way is up.
function compareValues(a, b, order) {
  const [missingA, missingB] = [a, b].map((value) => value === null || value === undefined);
  if (missingA || missingB) return missingA - missingB;
  return order * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
}

// A test of trials from a query: every word must be found, every condition must hold.
export function filter(study, query) {
  const tests = query.split(/\s+/).filter(Boolean).map((word) => {
    const parts = CONDITION.exec(word);
    if (parts === null) {
      const needle = word.toLowerCase();
      return (trial) => `#${trial.trial} ${trial.role} ${trial.state} ${trial.kind} ${trial.failure?.kind ?? ""} ${trial.label}`.toLowerCase().includes(needle);
    }
    const [, name, level, operator, wanted] = parts;
    return (trial) => valuesOf(study, trial, name, level).some((value) => holds(value, operator, wanted));
  });
  return (trial) => tests.every((test) => test(trial));
}

function valuesOf(study, trial, name, level) {
  if (study.index.has(name)) {
    const rows = level === undefined ? study.points.filter((point) => point.trial === trial) : [study.point(trial.trial, Number(level))];
    return rows.map((row) => study.value(row, name)).filter((value) => value !== null);
  }
  if (name === "trial") return [trial.trial];
  return name in trial.config ? [trial.config[name]] : [];
}

function holds(value, operator, wanted) {
  const number_ = Number(wanted);
  if (typeof value !== "number" || Number.isNaN(number_)) return operator === "=" && String(value) === wanted;
  return { "<": value < number_, "<=": value <= number_, ">": value > number_, ">=": value >= number_, "=": value === number_ }[operator];
}
