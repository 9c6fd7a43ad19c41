// The study itself: how far it is, where its time went, how fast it came to its front, which parameters matter.

import { Chart, valueAxis } from "./chart.js";
import { token } from "./colour.js";
import { el, fill, symbol } from "./dom.js";
import { clock, duration, number, percent, plural, shown } from "./format.js";
import { kindTitle, panel, trialLink } from "./parts.js";

const ROW = 22; // px of a slot

export class StudyView {
  constructor(context) {
    this.context = context;
    this.gantt = new Chart(140, "Which trial ran when, by slot");
    this.volume = new Chart(260, "Hypervolume after each trial, beside a random order");
    this.gantt.on("mouseover", (event) => this.hover(event));
    this.gantt.on("mouseout", () => this.gantt.hideTip());
    this.gantt.on("click", (event) => { if (event.data?.trial !== undefined) context.go("trial", event.data.trial); });
    this.volume.on("mouseover", (event) => { if (event.data?.trial !== undefined) this.volume.showTip(event.event, `after #${event.data.trial}: ${number(event.value[1])} % of the final hypervolume`); });
    this.volume.on("mouseout", () => this.volume.hideTip());
    this.progress = el("div");
    this.open = el("div");
    this.volumeNote = el("p", { className: "note", id: "volume" });
    this.importance = el("div");
    this.ganttLegend = el("div", { className: "legend" });
    this.ganttPanel = panel("Slots", null, this.gantt.node, this.ganttLegend);
    this.rest = el("div", { className: "stack" });
    this.node = el("div", { className: "stack" }, this.progress, this.open, this.ganttPanel,
      el("div", { className: "halves" }, panel("Hypervolume", null, this.volume.node, this.volumeNote), panel("Importance of parameters", null, this.importance)),
      this.rest);
  }

  show() {
    this.update();
  }

  update() {
    this.live();
    this.drawVolume();
    fill(this.importance, importances(this.context.study));
    fill(this.rest, failureKinds(this.context), el("div", { className: "halves" }, measuredWith(this.context.study), provenance(this.context.study)), files(this.context.study));
  }

  live() {
    fill(this.progress, progress(this.context.study));
    fill(this.open, openTrials(this.context));
    this.drawGantt();
  }

  drawGantt() {
    const { study } = this.context;
    const trials = [...study.trials.filter((trial) => trial.begin !== null && trial.segments.length > 0), ...study.live.open];
    this.ganttPanel.hidden = trials.length === 0;
    if (trials.length === 0) return;
    const lane = (trial) => study.live.lanes[trial.trial] ?? 0;
    const start = Math.min(...trials.map((trial) => trial.begin));
    const lanes = Math.max(...trials.map(lane)) + 1;
    const now = study.live.now;
    const bars = trials.map((trial) => {
      const end = trial.end ?? (study.live.state === "running" ? now : trial.begin + (trial.segments.at(-1)?.[2] ?? 0));
      return { value: [trial.begin - start, lane(trial), Math.max(end - start, trial.begin - start + 0.01)], trial: trial.trial, failed: Boolean(trial.failure), open: trial.end === null, kind: trial.kind, label: trial.label, role: trial.role ?? "" };
    });
    const colour = (bar) => bar.failed ? token("bad") : bar.open ? token("accent") : bar.role === "confirm" || bar.role === "repeat" ? token("s3") : bar.role === "baseline" ? token("text") : token("s0");
    const height = Math.min(420, 62 + lanes * ROW);
    this.gantt.canvas.style.height = `${height}px`;
    this.gantt.draw({
      grid: { left: 62, right: 18, top: 8, bottom: 44 },
      xAxis: valueAxis("x", "time since the start (s)", { scale: false, min: 0, axisLabel: { color: token("dim"), fontSize: 11.5, formatter: (value) => value >= 600 ? duration(value) : String(value) } }),
      yAxis: { ...valueAxis("y", lanes > 1 ? "slot" : "", {}), type: "category", data: Array.from({ length: lanes }, (_, i) => i + 1), inverse: true, scale: undefined, splitLine: { show: false }, axisLabel: { color: token("dim"), formatter: (value) => lanes > 1 ? value : "slot 1" } },
      dataZoom: [{ type: "inside", xAxisIndex: 0, zoomOnMouseWheel: "ctrl", moveOnMouseMove: true, filterMode: "weakFilter" }],
      series: [{
        type: "custom", cursor: "pointer", clip: true, data: bars, encode: { x: [0, 2], y: 1 },
        renderItem: (params, api) => {
          const bar = bars[params.dataIndex];
          const [x0, y] = api.coord([api.value(0), api.value(1)]);
          const [x1] = api.coord([api.value(2), api.value(1)]);
          const tall = Math.min(ROW - 6, api.size([0, 1])[1] * 0.7);
          const wide = Math.max(1.5, x1 - x0 - 1);
          return { type: "rect", shape: { x: x0, y: y - tall / 2, width: wide, height: tall, r: wide > 6 ? 2 : 0 }, style: { fill: colour(bar), opacity: bar.open ? 0.7 : 0.9 },
            textContent: wide > 26 ? { style: { text: `#${bar.trial}`, fill: token("surface"), fontSize: 11, fontWeight: 600 } } : undefined, textConfig: { position: "inside" } };
        },
      }],
    });
    const legend = [["searched", "s0"], ["baseline", "text"], ["confirmed again", "s3"], ["failed", "bad"], study.live.open.length > 0 && ["runs", "accent"]].filter(Boolean);
    fill(this.ganttLegend, legend.map(([text, name]) => el("span", null, el("i", { style: { background: token(name), borderRadius: "2px" } }), text)));
  }

  hover(event) {
    if (event.data?.trial === undefined) return;
    const { trial, label, value, role } = event.data;
    this.gantt.showTip(event.event, el("b", null, `#${trial} ${role}`), el("div", null, label ?? ""), el("div", { className: "dim" }, `${duration(value[2] - value[0])}, from ${duration(value[0])} on`));
  }

  drawVolume() {
    const { study } = this.context;
    const { trials, ours, random, note } = study.derived.hypervolume;
    const two = study.objectives.length > 1;
    this.volume.node.hidden = ours.length === 0;
    if (ours.length === 0) {
      fill(this.volumeNote, note || "Needs two measured trials that meet the constraints and differ.");
      return;
    }
    const line = (id, values, more) => ({ id, type: "line", data: values.map((value, i) => ({ value: [i + 1, 100 * value], trial: trials[i] })), showSymbol: values.length <= 60, symbolSize: 6, ...more });
    this.volume.draw({
      grid: { left: 58, right: 18, top: 14, bottom: 46 },
      xAxis: valueAxis("x", "launches", { scale: false, min: 1, max: Math.max(2, ours.length), minInterval: 1 }),
      yAxis: valueAxis("y", `final ${two ? "hypervolume" : "gain"} reached (%)`, { min: 0, max: 100, scale: false }),
      series: [
        line("random", random, { silent: true, showSymbol: false, lineStyle: { color: token("dim"), width: 1.5, type: [6, 4] }, itemStyle: { color: token("dim") }, endLabel: { show: true, formatter: "random order", color: token("dim"), offset: [-92, 16] } }),
        line("ours", ours, { step: "end", lineStyle: { color: token("accent"), width: 2.2 }, itemStyle: { color: token("accent") }, symbol: "circle" }),
      ],
    });
    const reached = (values) => values.findIndex((value) => value >= 0.95) + 1;
    const at = study.objectives.map((o) => `${o.metric} at ${o.at}`).join(" and ");
    fill(this.volumeNote, `Solid: this study, 95 % after ${plural(reached(ours), "launch").replace("launchs", "launches")}. Dashed: the same configurations in a random order, exact expectation, 95 % after ${reached(random)}. Of ${at}, as the optimiser is told; failed launches count as launches.`);
  }

  dispose() {
    this.gantt.dispose();
    this.volume.dispose();
  }
}

function progress(study) {
  const { live, about } = study;
  const fact = (value, text) => el("div", null, el("b", null, value), el("span", null, text));
  const state = (name) => study.trials.filter((trial) => trial.state === name).length;
  const { trials, wall, gpu_hours: gpuHours } = about.budget;
  const share = Math.max(trials ? live.launched / trials : 0, wall ? live.seconds / wall : 0, gpuHours ? live.gpu_hours / gpuHours : 0);
  const failed = study.failed.length;
  const total = Math.max(trials ?? live.launched, live.launched, 1);
  return panel("Progress", null,
    el("div", { className: "body stack" },
      el("div", { className: "facts" },
        fact(trials ? `${live.launched} of ${trials}` : String(live.launched), "launches of the budget"),
        fact(wall ? `${duration(live.seconds)} of ${duration(wall)}` : duration(live.seconds), "measuring time"),
        gpuHours ? fact(`${number(live.gpu_hours)} of ${number(gpuHours)}`, "GPU-hours") : live.gpu_hours > 0 && fact(number(live.gpu_hours), "GPU-hours"),
        live.state === "running" && fact(live.left === null ? "unknown" : `≈ ${duration(live.left)}`, live.left === null ? "time left" : `left, until ${clock(live.now + live.left).slice(11, 16)}`),
        fact(String(state("measured")), "measured"), fact(String(failed), "failed"), state("infeasible") > 0 && fact(String(state("infeasible")), "refused without a launch")),
      el("div", { className: "meter", role: "progressbar", "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": Math.round(100 * Math.min(1, share)), "aria-label": "Budget spent" },
        el("i", { style: { width: `${Math.min(100, 100 * share) * (1 - failed / total)}%` } }), el("i", { className: "failed", style: { width: `${Math.min(100, 100 * share) * (failed / total)}%` } })),
      el("p", { className: "dim" }, `${capital(live.text)}. ${about.summary}${searchWords(about.search)}`),
      study.leftOut.length > 0 && el("div", { className: "notice" }, `To keep this file small it goes without ${study.leftOut.join(", ")}; the dashboard has them.`),
      live.unreadable + live.too_long > 0 && el("div", { className: "notice" }, `${plural(live.unreadable + live.too_long, "line")} of the study's files could not be read and ${live.unreadable + live.too_long === 1 ? "is" : "are"} left out.`)));
}

function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

function openTrials(context) {
  const { live } = context.study;
  if (live.open.length === 0) return [];
  const running = live.state === "running";
  return panel(running ? "Running now" : "Cut off", null, el("div", { className: "body stack" }, live.open.map((trial) => el("div", null,
    el("strong", null, trialLink(context, trial), "\u2002", symbol(trial.kind ?? "none"), trial.label ?? ""),
    el("span", { className: "dim" }, `\u2002${trial.stage ?? "starts"}${trial.level ? ` at ${trial.level} in flight` : ""}${running ? `, ${duration(live.now - trial.begin)}` : ""}${trial.text ? `: ${trial.text}` : ""}`)))));
}

function importances(study) {
  const { importance } = study.derived;
  const paths = study.about.domains.map((domain) => domain.path);
  const known = importance.filter(({ share }) => share !== null);
  if (known.length === 0) return el("p", { className: "note" }, "Needs five measured trials and a parameter with two values.");
  const strength = (path) => Math.max(...importance.filter((each) => each.path === path).map((each) => each.share ?? -1));
  const colour = (i) => token(i === 0 ? "s0" : "s1");
  return [
    el("div", { className: "body bars", id: "importance" }, paths.toSorted((a, b) => strength(b) - strength(a)).map((path) => importance.filter((each) => each.path === path).map((each, i) => [
      el("span", null, i === 0 ? path : ""),
      el("div", { className: "track", role: "img", "aria-label": each.share === null ? "unknown" : percent(each.share) }, el("i", { style: { width: `${100 * (each.share ?? 0)}%`, background: colour(each.objective) } })),
      el("span", { className: "num dim" }, each.share === null ? "unknown" : percent(each.share))]))),
    el("div", { className: "legend" }, study.objectives.map((o, i) => el("span", null, el("i", { style: { background: colour(i) } }), `${o.metric} at ${o.at}`))),
    el("p", { className: "note" }, "Share of the variance of the metric's logarithm that the parameter explains alone (ω² of a one-way analysis, 0 % for one without effect). An optimiser's trials are no random sample: read it as a hint."),
  ];
}

function failureKinds(context) {
  const { study } = context;
  if (study.failed.length === 0) return [];
  const kinds = [...Map.groupBy(study.failed, (trial) => trial.failure.kind)].sort((a, b) => b[1].length - a[1].length);
  return panel("Failures", null, el("div", { className: "scroll body" }, el("table", { id: "failures" },
    el("thead", null, el("tr", null, ["kind", "what it means", "trials", "what to do"].map((text) => el("th", { className: "l" }, text)))),
    el("tbody", null, kinds.map(([kind, trials]) => el("tr", null, el("td", { className: "l" }, el("a", { href: context.href("trials", `q=${kind}`) }, `${kind} × ${trials.length}`)),
      el("td", { className: "l wrap" }, study.failures[kind] ?? ""), el("td", { className: "l wrap" }, trials.slice(0, 12).map((trial) => [trialLink(context, trial), " "]), trials.length > 12 ? "…" : ""),
      el("td", { className: "l wrap" }, trials[0].failure.advice)))))));
}

function pairs(rows) {
  return el("dl", { className: "pairs" }, rows.flatMap(([name, value]) => [el("dt", null, name), el("dd", null, value)]));
}

function measuredWith(study) {
  const { workload, objectives, constraints, pick, domains } = study.about;
  const limit = (c) => `${c.metric} ${c.max !== null ? `≤ ${c.max}` : `≥ ${c.min}`} ${c.at === null ? "at every load" : `at ${c.at} in flight`}`;
  return panel("Measured with", null, el("div", { className: "body" }, pairs([
    ["prompts", workload.prompts], ["output tokens", `at most ${workload.output_tokens}${workload.ignore_eos ? ", past the end of text" : ""}`],
    ["requests in flight", workload.concurrency.join(", ")], ["time per load", duration(workload.window)],
    ...objectives.map((o, i) => [`objective ${i + 1}`, `${o.goal} ${o.metric} at ${o.at} in flight`]), ...constraints.map((c) => ["constraint", limit(c)]),
    ...(pick.slo ? [["limits of the pick", pick.slo]] : []),
    ...domains.map((domain) => [domain.path, domain.kind === "choice" ? domain.values.join(", ") : `${domain.low} to ${domain.high}${domain.log ? ", logarithmic" : ""}`]),
  ])));
}

function provenance(study) {
  const rows = Object.entries(study.about.provenance).filter(([key]) => !["schema", "time"].includes(key)).map(([key, value]) => [key, shown(value)]);
  const began = study.about.began === null ? [] : [["began", clock(study.about.began)]];
  return panel("Provenance", null, el("div", { className: "body" }, pairs([...began, ...rows])));
}

function files(study) {
  const file = (name, text) => el("details", null, el("summary", null, name), el("pre", { tabIndex: 0 }, text));
  return panel("Files", null, el("div", { className: "body stack" }, file("space.yaml", study.about.space), study.about.launch !== null && file("launch.yaml", study.about.launch),
    el("p", { className: "dim" }, "Kinds of draft: ", study.kinds().map((kind) => [symbol(kind), kindTitle(kind), "  "]))));
}

// What the search says of itself: why it ended, what its prior and its packing came to.
function searchWords(search) {
  const packed = search.packing ?? [];
  const ratio = packed.length > 0 ? packed.reduce((sum, each) => sum + each.ratio, 0) / packed.length : null;
  return [
    search.ended && ` The search ended: ${search.ended}.`,
    search.prior === "believed" && " A roofline prior led it.",
    search.prior === "dropped" && " Its roofline prior erred and was dropped.",
    search.calibration && ` A neighbour that measures costs ${(100 * search.calibration.loss).toFixed(1)} % of speed.`,
    ratio !== null && ` Batches side by side took ${ratio.toFixed(2)} times the least possible.`,
  ].filter(Boolean).join("");
}
