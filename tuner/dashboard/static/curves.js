// Each configuration's curve over concurrency, where speculation stops paying, and the fitted policy.

import { band, Chart, shapeOf, valueAxis } from "./chart.js";
import { token } from "./colour.js";
import { choose, el, fill, symbol, tick } from "./dom.js";
import { number, shown, times } from "./format.js";
import { bestByLevel, crossings } from "./model.js";
import { emptyView, kindTitle, panel } from "./parts.js";

const MOST_FAINT = 300; // curves in the background

export class CurvesView {
  constructor(context) {
    this.context = context;
    const { study } = context;
    const throughput = study.objectives.find((objective) => objective.goal === "max") ?? study.objectives[0];
    this.options = context.keep("curves", { metric: throughput.metric, all: true });
    this.main = new Chart(Math.max(300, Math.min(430, window.innerHeight - 330)), "A metric over requests in flight, by configuration");
    this.ratio = new Chart(210, "Gain over no speculation, over requests in flight");
    for (const chart of [this.main, this.ratio]) {
      chart.on("mouseover", (event) => this.hover(chart, event));
      chart.on("mouseout", () => chart.hideTip());
      chart.on("click", (event) => { if (event.data?.trial) context.go("trial", event.data.trial.trial); });
    }
    this.controls = el("div", { className: "controls" });
    this.legend = el("div", { className: "legend" });
    this.said = el("p", { className: "note", id: "crossover" });
    this.policy = el("div");
    this.body = el("div", { className: "stack" },
      el("section", { className: "panel" }, el("header", null, el("h2", null, "Over concurrency"), this.controls), this.main.node, this.legend, this.policy),
      panel("Gain over no speculation", null, this.ratio.node, this.said));
    this.node = el("div");
  }

  show() {
    this.update();
  }

  update() {
    const { study } = this.context;
    if (study.points.length === 0) {
      fill(this.node, emptyView("No point is measured yet", "Curves appear with the first measured trial."));
      return;
    }
    if (!this.body.isConnected) fill(this.node, this.body);
    const metrics = study.measured().map((name) => [name, name]);
    fill(this.controls,
      choose("Metric", metrics, this.options.metric, (value) => { this.options.metric = value; this.update(); }),
      tick("Every configuration", this.options.all, (value) => { this.options.all = value; this.update(); }));
    this.draw();
  }

  // [concurrency, value, low, high, point] of a trial, ascending.
  curve(points) {
    const { study } = this.context;
    return points.filter((point) => study.value(point, this.options.metric) !== null)
      .map((point) => [point.concurrency, study.value(point, this.options.metric), ...(study.interval(point, this.options.metric) ?? [null, null]), point]);
  }

  lines() {
    const { study } = this.context;
    const byTrial = Map.groupBy(study.points, (point) => point.trial.trial);
    const lines = [];
    const baseline = study.points.filter((point) => point.baseline);
    const best = study.recommended?.trial;
    if (this.options.all) {
      const rest = [...byTrial].filter(([number_, points]) => !points[0].baseline && number_ !== best?.trial).slice(-MOST_FAINT);
      for (const [, points] of rest) lines.push({ name: points[0].trial.label, trial: points[0].trial, role: "faint", colour: token("faint"), curve: this.curve(points) });
    }
    const kinds = study.kinds().filter((kind) => kind !== "none");
    kinds.forEach((kind) => {
      const envelope = bestByLevel(study, study.points.filter((point) => point.trial.kind === kind), this.options.metric);
      lines.push({ name: `best ${kindTitle(kind)} at each load`, kind, role: "envelope", colour: token(`s${["dflash", "ddtree", "policy"].indexOf(kind) + 1 || 4}`),
        curve: this.curve([...envelope.values()].sort((a, b) => a.concurrency - b.concurrency)) });
    });
    if (best && !byTrial.get(best.trial)[0].baseline) lines.push({ name: `recommended: trial ${best.trial}`, trial: best, role: "best", colour: token("accent"), curve: this.curve(byTrial.get(best.trial)) });
    if (baseline.length > 0) lines.push({ name: "no speculation (baseline)", trial: baseline[0].trial, role: "baseline", colour: token("text"), curve: this.curve(baseline) });
    return lines.filter((line) => line.curve.length > 0);
  }

  draw() {
    const { study } = this.context;
    const lines = this.lines();
    const levels = [...new Set(study.points.map((point) => point.concurrency))].sort((a, b) => a - b);
    const axis = this.axis(levels);
    const policy = policyOf(study);
    const [marks, text] = this.crossover(lines);
    this.main.draw({
      xAxis: axis,
      yAxis: valueAxis("y", `${study.axis(this.options.metric)} · ${study.better(this.options.metric)}`, { max: highest(lines) }),
      series: [
        ...lines.filter((line) => line.role === "baseline" || line.role === "best").map((line) =>
          band(line.curve.filter((item) => item[2] !== null).map(([c, , low, high]) => [c, low, high]), line.colour)),
        ...lines.map((line) => this.series(line, line.curve.map(([c, value, , , point]) => ({ value: [c, value], trial: point.trial, point, line })))),
        this.expected(policy), this.markers(marks, policy, levels),
      ].filter(Boolean),
    });
    this.ratio.draw({
      grid: { left: 62, right: 18, top: 12, bottom: 46 },
      xAxis: axis,
      yAxis: valueAxis("y", "times the baseline (×)", { nameGap: 46 }),
      series: [...this.ratios(lines), this.markers(marks, null, levels)].filter(Boolean),
    });
    fill(this.legend, lines.filter((line) => line.role !== "faint").map((line) => el("span", null,
      symbol(line.kind ?? line.trial.kind, { colour: line.colour }), line.name)), this.options.all && el("span", null, el("i", { style: { background: token("faint"), opacity: "0.5" } }), "every other configuration"));
    fill(this.said, text);
    fill(this.policy, policyStrip(policy));
  }

  axis(levels) {
    if (levels.length === 1) return valueAxis("x", "requests in flight", { min: 0, max: 2 * levels[0] });
    return valueAxis("x", "requests in flight (logarithmic)", { type: "log", logBase: 2, min: levels[0], max: levels.at(-1), axisLabel: { color: token("dim"), fontSize: 11.5 } });
  }

  series(line, data) {
    const faint = line.role === "faint";
    return {
      type: "line", data, z: faint ? 1 : line.role === "baseline" ? 6 : 5, cursor: "pointer", triggerLineEvent: true,
      symbol: shapeOf(line.kind ?? line.trial.kind), symbolSize: faint ? 4 : 9,
      itemStyle: { color: line.colour, opacity: faint ? 0.3 : 1 },
      lineStyle: { color: line.colour, width: faint ? 0.8 : 2, opacity: faint ? 0.28 : 1, type: line.role === "baseline" ? [6, 4] : line.role === "envelope" ? [2, 2] : "solid" },
      emphasis: { lineStyle: { opacity: 1, width: 2.4 }, itemStyle: { opacity: 1 } },
    };
  }

  reference(lines) {
    const baseline = lines.find((line) => line.role === "baseline");
    return baseline ? new Map(baseline.curve.map(([c, value]) => [c, value])) : new Map();
  }

  gain(value, reference) {
    return this.context.study.metric(this.options.metric).goal === "min" ? reference / value : value / reference;
  }

  ratios(lines) {
    const reference = this.reference(lines);
    return lines.map((line) => this.series(line, line.curve.filter(([c]) => reference.has(c))
      .map(([c, value, , , point]) => ({ value: [c, this.gain(value, reference.get(c))], trial: point.trial, point, line }))));
  }

  // Where the best of speculation starts or stops to beat the baseline: [[concurrency, direction]], and in words.
  crossover(lines) {
    const { study } = this.context;
    const reference = this.reference(lines);
    const best = bestByLevel(study, study.points.filter((point) => point.trial.kind !== "none"), this.options.metric);
    const curve = [...best].sort((a, b) => a[0] - b[0]).map(([c, point]) => [c, study.value(point, this.options.metric)]).filter(([c]) => reference.has(c));
    if (curve.length === 0) return [[], "No configuration with speculation was measured beside the baseline."];
    const found = crossings(curve, curve.map(([c]) => [c, reference.get(c)]), study.metric(this.options.metric).goal);
    const range = `${curve[0][0]} to ${curve.at(-1)[0]} requests in flight`;
    if (found.length === 0) {
      const wins = this.gain(curve[0][1], reference.get(curve[0][0])) > 1;
      return [[], `No crossover from ${range}: in ${this.options.metric} the best configuration with speculation ${wins ? "is ahead of" : "stays behind"} the baseline at every load measured.`];
    }
    const words = found.map(([c, direction]) => `${direction < 0 ? "stops" : "starts"} paying at about ${number(c)}`);
    return [found, `Crossover: in ${this.options.metric}, speculation ${words.join(" and ")} requests in flight (between measured loads, by straight lines of the logarithms).`];
  }

  expected(policy) {
    const data = Object.entries(policy?.expected ?? {}).map(([c, values]) => [Number(c), values[this.options.metric]]).filter(([, value]) => Number.isFinite(value)).sort((a, b) => a[0] - b[0]);
    return data.length === 0 ? null : { id: "policy", type: "line", z: 7, silent: true, symbol: shapeOf("policy"), symbolSize: 7, data,
      itemStyle: { color: token("s3") }, lineStyle: { color: token("s3"), width: 3, opacity: 0.55 } };
  }

  markers(marks, policy, levels) {
    const lines = marks.map(([c]) => ({ xAxis: c, label: { formatter: `crossover ≈ ${number(c)}`, color: token("text"), fontSize: 11.5, position: "insideEndTop", rotate: 0, align: "right", padding: [0, 6, 0, 0] } }));
    const areas = (policy?.by_running ?? []).map(([from, to], i) => [
      { xAxis: Math.max(levels[0], from), itemStyle: { color: token("s3"), opacity: i % 2 === 0 ? 0.07 : 0.02 } }, { xAxis: Math.min(levels.at(-1), to ?? levels.at(-1)) }]);
    return {
      type: "line", data: [], silent: true,
      markLine: { silent: true, symbol: "none", data: lines, lineStyle: { color: token("text"), type: "solid", width: 1, opacity: 0.7 } },
      markArea: { silent: true, data: areas },
    };
  }

  hover(chart, event) {
    const { point, line } = event.data ?? {};
    if (!point) return;
    const { study } = this.context;
    const interval = study.interval(point, this.options.metric);
    chart.showTip(event.event, el("b", null, line.role === "envelope" ? line.name : `Trial ${point.trial.trial}`), el("div", null, point.trial.label),
      el("div", { className: "dim" }, `${point.concurrency} in flight: ${number(study.value(point, this.options.metric))}${interval ? ` [${number(interval[0])}–${number(interval[1])}]` : ""} ${study.metric(this.options.metric).unit} · ${times(point.speedup)} baseline`));
  }

  dispose() {
    this.main.dispose();
    this.ratio.dispose();
  }
}

// The top of the axis: intervals are drawn apart from the lines, so the chart does not know of them.
function highest(lines) {
  const values = lines.filter((line) => line.role !== "faint").flatMap((line) => line.curve.flatMap(([, value, , high]) => [value, high ?? value]));
  const faint = lines.flatMap((line) => line.curve.map(([, value]) => value));
  const top = Math.max(...values, ...faint) * 1.02;
  const step = 10 ** Math.floor(Math.log10(top)) / 5;
  return Math.ceil(top / step) * step;
}

function policyOf(study) {
  return study.about.policy;
}

function draftWords(draft) {
  const words = Object.entries(draft).filter(([key, value]) => key !== "kind" && value !== null && key !== "model" && key !== "sample");
  return [draft.kind ?? "none", ...words.map(([key, value]) => `${key}=${shown(value)}`)].join(" ");
}

function policyStrip(policy) {
  if (!policy) return el("p", { className: "note" }, "No policy is fitted yet: one configuration serves every load.");
  if (policy.problem) return el("p", { className: "note bad" }, `No policy can be shown: ${policy.problem}.`);
  const judged = policy.accepted === true ? " Accepted" : policy.accepted === false ? " Not accepted" : "";
  return [
    el("p", { className: "note" }, `Fitted policy (${policy.source}): the draft by running requests.${judged || policy.why ? `${judged || " Not judged"}: ${policy.why}.` : ""}`),
    el("div", { className: "policy" }, policy.by_running.map(([from, to, draft]) => el("div", { title: JSON.stringify(draft), style: { flex: "1 1 auto" } },
      symbol(draft.kind ?? "none"), el("b", null, to === null ? `${from} and more` : from === to ? String(from) : `${from}–${to}`), `\u2002${draftWords(draft)}`))),
  ];
}
