// Latency against throughput: every measured point, the front, the baseline, and what failed.

import { Chart, shapeOf, valueAxis, whiskers } from "./chart.js";
import { colouring, colourings, token } from "./colour.js";
import { choose, command, el, fill, symbol, tick } from "./dom.js";
import { number, plural, times } from "./format.js";
import { kindTitle, emptyView, failureText, named, panel, pointDetail, pointTags, trialLink, mainMetrics } from "./parts.js";

const CROWDED = 120; // points; beyond, intervals are drawn for the front and the baseline only
const MOST_CHIPS = 24;
const WIDE = 15; // highest over lowest from which a logarithmic axis shows more

export class FrontView {
  constructor(context) {
    this.context = context;
    const [first, second] = context.study.objectives;
    this.options = context.keep("front", {
      x: second ? first.metric : "concurrency", y: (second ?? first).metric,
      colour: "concurrency", intervals: true, dominated: true, log: wide(context.study, (second ?? first).metric),
    });
    this.chart = new Chart(Math.max(340, Math.min(560, window.innerHeight - 350)), "Latency against throughput of every measured point");
    this.chart.on("mouseover", (event) => this.hover(event));
    this.chart.on("mouseout", () => this.chart.hideTip());
    this.chart.on("click", (event) => { if (this.pointOf(event)) this.pin(this.pointOf(event)); });
    this.hero = el("div");
    this.controls = el("div", { className: "controls" });
    this.legend = el("div", { className: "legend" });
    this.failures = el("div", { className: "failures" });
    this.side = el("aside", { className: "panel detail", "aria-live": "polite" });
    this.table = el("div");
    this.node = el("div", { className: "stack" }, this.hero,
      this.cols = el("div", { className: "cols" },
        el("section", { className: "panel" },
          el("header", null, el("h2", null, "Front"), this.controls), this.chart.node, this.legend, this.failures),
        this.side),
      this.table);
  }

  show() {
    this.update();
  }

  update() {
    const { study } = this.context;
    fill(this.hero, recommendation(this.context));
    fill(this.controls, this.choices());
    this.cols.hidden = study.points.length === 0 && study.failed.length === 0;
    if (!this.cols.hidden) this.draw();
    fill(this.failures, failures(this.context));
    this.failures.hidden = this.failures.childElementCount === 0;
    fill(this.table, frontTable(this.context, (point) => this.pin(point)));
    const pinned = this.pinned && study.byKey.get(this.pinned);
    this.detail(pinned || study.recommended || study.front[0] || study.points[0] || null);
  }

  choices() {
    const { study } = this.context;
    const metrics = study.measured().map((name) => [name, name]);
    const set = (key) => (value) => { this.options[key] = value; this.draw(); };
    return [
      choose("Across", [["concurrency", "requests in flight"], ...metrics], this.options.x, set("x")),
      choose("Up", metrics, this.options.y, set("y")),
      choose("Colour", colourings(study).map(([key, title]) => [key, title]), this.options.colour, set("colour")),
      tick("Intervals", this.options.intervals, set("intervals")),
      tick("Dominated", this.options.dominated, set("dominated")),
      tick("Log", this.options.log, set("log")),
    ];
  }

  place(row, name) {
    return name === "concurrency" ? row.concurrency : this.context.study.value(row, name);
  }

  draw() {
    const { study } = this.context;
    const { x, y } = this.options;
    const visible = study.points.filter((point) =>
      this.place(point, x) !== null && this.place(point, y) !== null && (this.options.dominated || point.front || point.baseline));
    const [, , valueOf] = colourings(study).find(([key]) => key === this.options.colour) ?? colourings(study)[0];
    const colours = colouring(visible.map(valueOf));
    const colour = (point) => colours.of(valueOf(point));
    fill(this.legend, legend(study, colours, colourings(study).find(([key]) => key === this.options.colour)[1]));
    const title = (name) => name === "concurrency" ? "requests in flight"
      : `${study.axis(name)} · ${study.metric(name).goal === "min" ? "lower is better" : "higher is better"}`;
    const log = x === "concurrency" && study.levels.length > 1;
    this.chart.draw({
      xAxis: valueAxis("x", title(x), log ? { type: "log", logBase: 2 } : {}),
      yAxis: valueAxis("y", title(y), this.options.log ? { type: "log", logBase: 2 } : {}),
      dataZoom: [{ type: "inside", xAxisIndex: 0, zoomOnMouseWheel: "ctrl", moveOnMouseMove: false }, { type: "inside", yAxisIndex: 0, zoomOnMouseWheel: "ctrl", moveOnMouseMove: false }],
      series: [
        this.baselineLine(), this.stair(), this.whiskersOf(visible, colour), ...this.marks(visible, colour), this.cutShort(),
      ].filter(Boolean),
    });
  }

  // A series for each look, so that a point is two numbers: thousands are drawn in no time.
  marks(visible, colour) {
    const place = (point) => [this.place(point, this.options.x), this.place(point, this.options.y)];
    const look = (point) => [point.front ? "front" : "dominated", point.trial.kind, point.feasible ? "feasible" : "infeasible"].join("/");
    this.layers = Map.groupBy(visible, look);
    return [...this.layers].map(([id, points]) => {
      const { front, feasible, baseline, trial } = points[0];
      const hollow = (point) => ({ value: place(point), itemStyle: { color: "transparent", borderColor: colour(point), borderWidth: 1.5, opacity: 0.85 } });
      return {
        id, type: "scatter", z: front ? 5 : 3, cursor: "pointer", symbol: shapeOf(trial.kind), symbolSize: front ? 13 : 9,
        emphasis: { scale: 1.45 }, data: points.map(feasible ? place : hollow),
        itemStyle: { color: ({ dataIndex }) => colour(points[dataIndex]), opacity: front || baseline ? 1 : 0.42, borderColor: token("surface"), borderWidth: front ? 1 : 0.6 },
      };
    });
  }

  pointOf(event) {
    return this.layers?.get(event.seriesId)?.[event.dataIndex] ?? null;
  }

  whiskersOf(visible, colour) {
    if (!this.options.intervals) return null;
    const { study } = this.context;
    const { x, y } = this.options;
    const few = visible.length > CROWDED ? visible.filter((point) => point.front || point.baseline) : visible;
    const data = few.map((point) => [
      this.place(point, x), this.place(point, y),
      ...(x === "concurrency" ? [NaN, NaN] : study.interval(point, x) ?? [NaN, NaN]), ...(study.interval(point, y) ?? [NaN, NaN]),
    ]);
    return whiskers(data, (i) => colour(few[i]), (i) => (few[i].front ? 0.8 : 0.28));
  }

  // The border of what the front dominates; only where both axes are the objectives.
  stair() {
    const { study } = this.context;
    const { x, y } = this.options;
    const metrics = study.objectives.map((objective) => objective.metric);
    if (metrics.length < 2 || !metrics.includes(x) || !metrics.includes(y) || x === y) return null;
    const front = study.front.map((point) => [study.value(point, x), study.value(point, y)]).sort((a, b) => a[0] - b[0]);
    if (front.length < 2) return null;
    return {
      id: "stair", type: "line", step: study.metric(x).goal === "min" ? "end" : "start", data: front, silent: true, symbol: "none", z: 2,
      lineStyle: { color: token("text"), width: 1.3, opacity: 0.55 },
    };
  }

  baselineLine() {
    const { study } = this.context;
    const points = study.points.filter((point) => point.baseline && this.place(point, this.options.x) !== null && this.place(point, this.options.y) !== null);
    if (points.length === 0) return null;
    return {
      id: "baseline", type: "line", z: 4, silent: true, symbol: "circle", symbolSize: 19,
      data: points.map((point) => [this.place(point, this.options.x), this.place(point, this.options.y), point.concurrency]),
      itemStyle: { color: "transparent", borderColor: token("text"), borderWidth: 1.4 },
      lineStyle: { color: token("dim"), width: 1.3, type: [5, 4] },
      label: { show: points.length <= 12, position: "top", distance: 4, color: token("text"), fontSize: 11, textBorderColor: token("surface"), textBorderWidth: 3,
        formatter: ({ data, dataIndex }) => (dataIndex === points.length - 1 ? `no speculation, c=${data[2]}` : `c=${data[2]}`) },
      labelLayout: { hideOverlap: true, moveOverlap: "shiftY" },
    };
  }

  // Levels measured before a trial failed: crosses, since they are on no front.
  cutShort() {
    const { study } = this.context;
    const data = study.failed.flatMap((trial) => study.rows(trial).map((row) => ({
      value: [this.place(row, this.options.x), this.place(row, this.options.y)], failed: trial,
    }))).filter((item) => item.value.every((value) => value !== null));
    return data.length === 0 ? null : {
      id: "failed", type: "scatter", z: 2, symbol: shapeOf("failed"), symbolSize: 9, data,
      itemStyle: { color: token("bad"), opacity: 0.9 },
    };
  }

  hover(event) {
    const { study } = this.context;
    const point = this.pointOf(event);
    if (event.data?.failed) {
      this.chart.showTip(event.event, el("b", null, `Trial ${event.data.failed.trial} failed later`), el("div", null, failureText(study, event.data.failed)));
    }
    if (!point) return;
    if (!this.pinned) this.detail(point);
    this.chart.showTip(event.event, el("b", null, `#${point.trial.trial} at ${plural(point.concurrency, "request")}`), el("div", null, point.trial.label),
      el("div", { className: "dim" }, `${number(this.place(point, this.options.x))} · ${number(this.place(point, this.options.y))} · ${times(point.speedup)} baseline`));
  }

  pin(point) {
    this.pinned = this.pinned === point.key ? null : point.key;
    this.detail(point);
  }

  detail(point) {
    if (point === null) {
      fill(this.side, el("div", { className: "empty" }, "A point's configuration and launch command show here."));
      return;
    }
    this.shown = point.key;
    fill(this.side,
      el("header", null, el("h2", null, this.pinned === point.key ? "Pinned point" : "Point"), el("div", { className: "controls" },
        el("button", { type: "button", className: "quiet", on: { click: () => this.pin(point) } }, this.pinned === point.key ? "Unpin" : "Pin"))),
      el("div", { className: "body" }, pointDetail(this.context, point)));
  }

  dispose() {
    this.chart.dispose();
  }
}

function wide(study, metric) {
  const values = study.points.map((point) => study.value(point, metric)).filter((value) => value > 0);
  return Math.max(...values) > WIDE * Math.min(...values);
}

function recommendation(context) {
  const { study } = context;
  const best = study.derived.recommendation;
  const point = study.recommended;
  if (best === null || point === null) {
    const why = study.derived.why || "nothing was measured yet";
    return emptyOrNotice(study, why);
  }
  const synthetic = point.trial.synthetic ? el("p", { className: "warn" }, "Synthetic: dummy weights or forced acceptance. Only timing means anything.") : null;
  return el("section", { className: "panel hero", "aria-label": "Recommendation" },
    el("div", { className: "big", title: `${best.metric} against no speculation at the same load` },
      best.speedup === null ? number(study.value(point, best.metric)) : best.speedup.toFixed(2), el("small", null, best.speedup === null ? study.metric(best.metric).unit : "×")),
    el("div", { className: "what" },
      el("strong", null, `At ${plural(point.concurrency, "request")} in flight serve `, trialLink(context, point.trial, `trial ${point.trial.trial}`), `: ${point.trial.label}`),
      el("p", null, `${best.metric} ${number(study.value(point, best.metric))}${bounds(study, point, best.metric)} ${study.metric(best.metric).unit}. `, best.lines.join(" ")), best.reasons.length > 0 && el("ul", { className: "said", id: "reasons" }, best.reasons.map((line) => el("li", null, line))), synthetic),
    study.about.launch === null ? el("div", { className: "dim" }, "launch.yaml is written when the search ends.") : command(study.about.command, true));
}

function bounds(study, point, name) {
  const interval = study.interval(point, name);
  return interval === null ? "" : ` [${number(interval[0])}–${number(interval[1])}]`;
}

function emptyOrNotice(study, why) {
  if (study.trials.length === 0) return emptyView("No trial is recorded yet", study.live.state === "running" ? "The baseline is measured first; the page fills by itself." : study.live.text);
  return el("div", { className: "notice" }, `Nothing to recommend: ${why}.`);
}

function legend(study, colours, title) {
  const kinds = study.kinds().map((kind) => el("span", null, symbol(kind), kindTitle(kind)));
  const hues = colours.items
    ? colours.items.map(([text, colour]) => el("span", null, el("i", { style: { background: colour } }), text))
    : [el("span", null, colours.ends[0], el("i", { className: "ramp", style: { background: `linear-gradient(90deg, ${colours.stops.join(", ")})` } }), colours.ends[1])];
  const separator = () => el("span", { className: "sep" });
  const states = [
    el("span", null, symbol("none", { hollow: true }), "misses a constraint"),
    study.failed.some((trial) => study.rows(trial).length > 0) && el("span", { className: "bad" }, symbol("failed"), "failed later"),
  ];
  return [kinds, separator(), el("span", null, `${title}:`), hues, separator(), study.points.some((point) => !point.feasible) || study.failed.length > 0 ? states : null,
    el("span", null, "large: on the front, faint: dominated, ringed: baseline")];
}

// Trials that failed have no place in the plane: each is a mark below it, grouped when they are many.
function failures(context) {
  const { study } = context;
  if (study.failed.length === 0) return [];
  const head = el("span", null, `${study.failed.length} failed:`);
  if (study.failed.length <= MOST_CHIPS) {
    return [head, study.failed.map((trial) => el("a", { href: context.href("trial", trial.trial), title: failureText(study, trial) }, `✕ #${trial.trial} ${trial.failure.kind}`))];
  }
  const kinds = Map.groupBy(study.failed, (trial) => trial.failure.kind);
  return [head, [...kinds].sort((a, b) => b[1].length - a[1].length).map(([kind, trials]) =>
    el("a", { href: context.href("trials", `q=${kind}`), title: study.failures[kind] }, `✕ ${kind} × ${trials.length}`))];
}

function frontTable(context, pin) {
  const { study } = context;
  if (study.front.length === 0) return [];
  const names = mainMetrics(study).filter((name) => study.front.some((point) => study.value(point, name) !== null));
  const head = el("tr", null, el("th", { className: "l", scope: "col" }, "configuration"), el("th", { scope: "col" }, "in flight"),
    names.map((name) => el("th", { scope: "col", title: study.metric(name).description }, name, el("small", null, study.metric(name).unit))),
    el("th", { scope: "col" }, "× baseline"), el("th", { className: "l", scope: "col" }, ""));
  const best = study.recommended;
  const rows = study.front.map((point) => el("tr", { className: point === best ? "chosen" : "", data: { point: point.key } },
    el("td", { className: "l" }, trialLink(context, point.trial, `#${point.trial.trial}`), "\u2002", named(point.trial)),
    el("td", null, String(point.concurrency)),
    names.map((name) => {
      const interval = study.interval(point, name);
      return el("td", null, number(study.value(point, name)), interval && el("span", { className: "iv" }, `${number(interval[0])}–${number(interval[1])}`));
    }),
    el("td", null, times(point.speedup)),
    el("td", { className: "l" }, el("button", { type: "button", className: "quiet", on: { click: () => { pin(point); } } }, "show"), " ",
      pointTags(point).filter((tag) => tag.textContent !== "on the front"))));
  return panel("On the front", null, el("div", { className: "scroll body" }, el("table", null, el("thead", null, head), el("tbody", null, rows))),
    el("p", { className: "note" }, "Small figures are 95 % intervals. × baseline compares throughput with no speculation at the same load. Tied: the intervals of every objective overlap."));
}
