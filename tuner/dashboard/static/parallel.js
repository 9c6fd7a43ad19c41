// Parallel coordinates: a line per trial over the searched parameters and the objectives; brush an axis to filter.

import { Chart } from "./chart.js";
import { onRamp, ramp, token } from "./colour.js";
import { choose, el, fill } from "./dom.js";
import { number, plural, shown } from "./format.js";
import { emptyView, named, panel, trialLink } from "./parts.js";

const ABSENT = "–"; // a parameter that this configuration does not have
const MOST_LISTED = 12;

export class ParallelView {
  constructor(context) {
    this.context = context;
    const { study } = context;
    this.options = context.keep("parallel", { colour: study.objectives.at(-1).metric });
    this.brushed = new Map(); // axis index to its intervals
    this.chart = new Chart(Math.max(340, Math.min(500, window.innerHeight - 330)), "Parallel coordinates of every measured trial");
    this.chart.on("axisareaselected", () => this.select());
    this.controls = el("div", { className: "controls" });
    this.ramp = el("div", { className: "legend" });
    this.count = el("p", { className: "note", id: "brushed", role: "status" });
    this.list = el("div");
    this.body = el("div", { className: "stack" },
      el("section", { className: "panel" }, el("header", null, el("h2", null, "Parameters and outcomes"), this.controls), this.chart.node, this.ramp,
        el("p", { className: "note" }, "Drag along an axis to keep the trials that pass there; click the axis to let them all pass again. Without a mouse, the boxes below do the same.")),
      el("section", { className: "panel" }, el("header", null, el("h2", null, "Kept")), this.boxes = el("div", { className: "toolbar" }), this.count, this.list));
    this.node = el("div");
  }

  show() {
    this.update();
  }

  update() {
    const { study } = this.context;
    this.trials = study.trials.filter((trial) => trial.points.length > 0);
    if (this.trials.length === 0) {
      fill(this.node, emptyView("No trial is measured yet", "A line appears with every measured trial."));
      return;
    }
    if (!this.body.isConnected) fill(this.node, this.body);
    this.axes = this.makeAxes();
    fill(this.controls, choose("Colour", study.objectives.map((o) => [o.metric, `${o.metric} at ${o.at}`]), this.options.colour, (value) => { this.options.colour = value; this.draw(); }));
    fill(this.boxes, this.axes.filter((axis) => axis.categories && axis.categories.length > 1).map((axis) => this.filterBox(axis)));
    this.draw();
  }

  makeAxes() {
    const { study } = this.context;
    const searched = study.about.domains.map((domain) => ({ title: domain.path, domain, of: (trial) => trial.params[domain.path] ?? null }));
    const outcomes = study.objectives.map((objective) => ({
      title: `${objective.metric}\n${study.metric(objective.metric).unit}, at ${objective.at}`, goal: objective.goal,
      of: (trial) => study.value(study.point(trial.trial, objective.at), objective.metric),
    }));
    const accept = { title: "accept_length\ntokens/round", of: (trial) => study.value(study.point(trial.trial, study.objectives[0].at), "accept_length") };
    const varied = searched.filter((axis) => new Set(this.trials.map(axis.of)).size > 1);
    this.same = searched.filter((axis) => !varied.includes(axis)).map((axis) => `${axis.title} ${shown(axis.of(this.trials[0]))}`);
    return [...varied, ...(this.trials.some((trial) => accept.of(trial) !== null) ? [accept] : []), ...outcomes].map((axis, index) => this.withScale(axis, index));
  }

  // A number axis where every trial has a number and they are many; else one of categories, with one for absent.
  withScale(axis, index) {
    const values = this.trials.map(axis.of);
    const numbers = values.filter((value) => typeof value === "number");
    const distinct = [...new Set(values.filter((value) => value !== null))];
    const continuous = axis.domain === undefined || (numbers.length === values.length && distinct.length > 12);
    if (continuous) return { ...axis, index, value: axis.of };
    const ordered = distinct.every((value) => typeof value === "number") ? distinct.sort((a, b) => a - b) : distinct;
    const categories = [...(values.includes(null) ? [ABSENT] : []), ...ordered.map(shown)];
    return { ...axis, index, categories, value: (trial) => { const value = axis.of(trial); return value === null ? ABSENT : shown(value); } };
  }

  filterBox(axis) {
    const now = this.brushed.get(axis.index);
    const current = now?.length === 1 && now[0][0] === now[0][1] ? String(now[0][0]) : "";
    return choose(axis.title, [["", "all"], ...axis.categories.map((text, i) => [String(i), text])], current, (value) => {
      if (value === "") this.brushed.delete(axis.index); else this.brushed.set(axis.index, [[Number(value), Number(value)]]);
      this.draw();
    });
  }

  draw() {
    const { study } = this.context;
    const objective = study.objectives.find((o) => o.metric === this.options.colour) ?? study.objectives[0];
    const values = this.trials.map((trial) => study.value(study.point(trial.trial, objective.at), objective.metric));
    const known = values.filter((value) => value !== null);
    const [low, high] = [Math.min(...known), Math.max(...known)];
    const stops = ramp();
    fill(this.ramp, known.length > 0 ? [el("span", null, `${objective.metric} at ${objective.at} in flight:`), el("span", null, number(low), el("i", { className: "ramp", style: { background: `linear-gradient(90deg, ${stops.join(", ")})` } }), `${number(high)} ${study.metric(objective.metric).unit}`), el("span", null, "thick: on the front"), this.same.length > 0 && el("span", null, `the same in all: ${this.same.join(", ")}`)] : []);
    const front = new Set(study.front.map((point) => point.trial.trial));
    this.chart.draw({
      parallel: { left: 60, right: 80, top: 54, bottom: 26, parallelAxisDefault: { nameLocation: "end", nameGap: 14 } },
      parallelAxis: this.axes.map((axis) => this.axisOption(axis)),
      series: [{
        type: "parallel", smooth: 0.06, inactiveOpacity: 0.035, activeOpacity: this.trials.length > 200 ? 0.5 : 0.8,
        data: this.trials.map((trial, i) => ({
          value: this.axes.map((axis) => axis.value(trial) ?? NaN),
          lineStyle: { color: values[i] === null ? token("faint") : onRamp(high > low ? (values[i] - low) / (high - low) : 1, stops), width: front.has(trial.trial) ? 2.8 : 1.1 },
        })),
      }],
    });
    this.applyBrushes();
    this.listKept();
  }

  axisOption(axis) {
    return {
      dim: axis.index, name: axis.title, inverse: axis.goal === "min", nameLocation: axis.goal === "min" ? "start" : "end",
      ...(axis.categories ? { type: "category", data: axis.categories } : { type: "value", scale: true }),
      nameTextStyle: { color: token("text"), fontSize: 11.5, fontWeight: 560, lineHeight: 15 },
      axisLine: { lineStyle: { color: token("axis"), width: 1.2 } }, axisTick: { lineStyle: { color: token("axis") } },
      axisLabel: { color: token("text"), fontSize: 11, textBorderColor: token("surface"), textBorderWidth: 3, formatter: (value) => typeof value === "number" ? String(Number(value.toPrecision(4))) : value.length > 16 ? `${value.slice(0, 15)}…` : value },
      areaSelectStyle: { width: 18, borderColor: token("accent"), color: token("accent"), opacity: 0.22 },
    };
  }

  applyBrushes() {
    for (const [index, intervals] of this.brushed) {
      const axis = this.axes[index];
      const wide = axis?.categories ? intervals.map(([from, to]) => [from - 0.4, to + 0.4]) : intervals;
      this.chart.chart.dispatchAction({ type: "axisAreaSelect", parallelAxisId: this.axisId(index), intervals: wide });
    }
  }

  axisModel(index) {
    return this.chart.chart.getModel().getComponent("parallelAxis", index);
  }

  axisId(index) {
    return this.axisModel(index).id;
  }

  // Read what is brushed after the mouse did it.
  select() {
    this.brushed.clear();
    this.axes.forEach((axis, index) => {
      const intervals = this.axisModel(index).activeIntervals ?? [];
      if (intervals.length > 0) this.brushed.set(index, intervals.map(([a, b]) => [Math.min(a, b), Math.max(a, b)]));
    });
    this.listKept();
  }

  // Keep the trials that pass all brushes; a category counts by its place on the axis.
  kept() {
    return this.trials.filter((trial) => [...this.brushed].every(([index, intervals]) => {
      const axis = this.axes[index];
      const value = axis.value(trial);
      const at = axis.categories ? axis.categories.indexOf(value) : value;
      return at !== null && intervals.some(([low, high]) => at >= low && at <= high);
    }));
  }

  listKept() {
    const { study } = this.context;
    const objective = study.objectives.find((o) => o.metric === this.options.colour) ?? study.objectives[0];
    const of = (trial) => study.value(study.point(trial.trial, objective.at), objective.metric);
    const kept = this.kept();
    const sign = objective.goal === "min" ? 1 : -1;
    const ranked = kept.filter((trial) => of(trial) !== null).sort((a, b) => sign * (of(a) - of(b)));
    fill(this.count, `${kept.length} of ${plural(this.trials.length, "measured trial")} kept${ranked.length > MOST_LISTED ? `; the best ${MOST_LISTED} by ${objective.metric}:` : ""}`);
    fill(this.list, el("div", { className: "scroll body" }, el("table", null,
      el("thead", null, el("tr", null, el("th", { className: "l" }, "configuration"), study.objectives.map((o) => el("th", null, `${o.metric}`, el("small", null, `${study.metric(o.metric).unit}, at ${o.at}`))))),
      el("tbody", null, ranked.slice(0, MOST_LISTED).map((trial) => el("tr", null, el("td", { className: "l" }, trialLink(this.context, trial), "\u2002", named(trial)),
        study.objectives.map((o) => el("td", null, number(study.value(study.point(trial.trial, o.at), o.metric))))))))));
  }

  dispose() {
    this.chart.dispose();
  }
}
