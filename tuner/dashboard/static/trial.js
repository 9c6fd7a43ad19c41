// One trial: its course, what it measured, where its rounds' time went, and what became of what was asked for.

import { categoryAxis, Chart, valueAxis } from "./chart.js";
import { onRamp, token } from "./colour.js";
import { command, el, fill, save, symbol } from "./dom.js";
import { clock, duration, number, percent, plural, shown, times } from "./format.js";
import { launchCommand, launchFile } from "./launch.js";
import { LogTail } from "./log.js";
import { makeRow } from "./model.js";
import { emptyView, failureText, kindTitle, panel, pointTags, statePill, trialLink } from "./parts.js";

const PARTS = ["prefill", "propose", "forward", "accept", "commit"];
const PART_TITLES = { prefill: "prefill", propose: "propose (draft)", forward: "forward (verify)", accept: "accept", commit: "commit (KV cache)" };

export class TrialView {
  constructor(context) {
    this.context = context;
    this.number = Number(context.rest);
    this.positions = new Chart(230, "Share of rounds that accepted each draft position");
    this.log = new LogTail(context, this.number, () => context.source.live && this.isOpen());
    this.top = el("div", { className: "stack" });
    this.node = el("div", { className: "stack" }, this.top, this.log.node);
  }

  get trial() {
    return this.context.study.byNumber.get(this.number) ?? null;
  }

  isOpen() {
    return this.context.study.live.open.some((trial) => trial.trial === this.number);
  }

  show() {
    this.update();
    this.log.start();
  }

  update() {
    const { study } = this.context;
    const open = study.live.open.find((trial) => trial.trial === this.number);
    if (open !== undefined) this.whileOpen(open);
    else if (this.trial !== null) this.whole(this.trial);
    else fill(this.top, emptyView(`There is no trial ${this.number}`, study.trials.length > 0 ? `Recorded are ${study.trials[0].trial} to ${study.trials.at(-1).trial}.` : "None is recorded yet."));
    this.log.wake();
  }

  live() {
    this.update();
  }

  heading(trial, pill) {
    const { context } = this;
    const numbers = [...new Set([...context.study.byNumber.keys(), ...context.study.live.open.map((each) => each.trial)])].sort((a, b) => a - b);
    const at = numbers.indexOf(this.number);
    const step = (text, to) => (to === undefined ? null : el("a", { href: context.href("trial", to), rel: text === "‹" ? "prev" : "next" }, text === "‹" ? `‹ #${to}` : `#${to} ›`));
    return el("div", { className: "title-row" },
      el("a", { href: context.href("trials") }, "Trials"), el("span", { className: "faint" }, "/"),
      el("h1", null, symbol(trial.kind ?? "none"), `#${trial.trial} ${trial.label ?? ""}`), pill,
      trial.of !== undefined && trial.of !== null && el("span", { className: "dim" }, `${trial.role} of `, el("a", { href: context.href("trial", trial.of) }, `#${trial.of}`)),
      el("div", { className: "steps" }, step("‹", numbers[at - 1]), step("›", numbers[at + 1])));
  }

  whileOpen(open) {
    const running = this.context.study.live.state === "running";
    fill(this.top,
      this.heading(open, el("span", { className: `pill ${running ? "running" : "died"}` }, running ? `${open.stage ?? "starts"}${open.level ? ` at ${open.level}` : ""}` : "cut off")),
      open.text && el("p", { className: "dim" }, open.text),
      panel("Course", null, el("div", { className: "body" }, course(open, running ? this.context.study.live.now - open.begin : null))),
      open.levels.length > 0 && panel("Measured so far", null, this.levels(open.levels.map(makeRow), null)),
      open.config && panel("Configuration", null, this.configs({ config: open.config, resolved: null })));
  }

  whole(trial) {
    const { study } = this.context;
    const rows = study.rows(trial);
    fill(this.top,
      this.heading(trial, statePill(trial)),
      this.facts(trial),
      trial.failure && this.failure(trial),
      el("div", { className: "halves" },
        panel("Course", null, el("div", { className: "body" }, course(trial, null))),
        panel("Serve it", [el("button", { type: "button", on: { click: () => save(`trial-${trial.trial}.yaml`, "application/yaml", launchFile(study, trial)) } }, "Save launch.yaml"),
          el("a", { href: this.context.href("trials", `compare=${this.comparedWith(trial)},${trial.trial}`) }, "Compare with the baseline")], el("div", { className: "body" }, command(launchCommand(study, trial))))),
      rows.length > 0 && panel("Measured", null, this.levels(rows, trial)),
      rows.length > 0 && el("div", { className: "halves" }, this.rounds(trial), this.acceptance(trial)),
      trial.explained.length > 0 && panel("In words", null, el("div", { className: "body" }, el("ul", { className: "said", id: "explained" }, trial.explained.map((line) => el("li", null, line))))),
      rows.length > 0 && this.headroom(trial),
      trial.parity && this.parity(trial.parity),
      panel("Configuration: asked and resolved", null, this.configs(trial)),
      trial.lines.length > 0 && panel("Said on the way", null, el("div", { className: "body" }, el("ul", { className: "said" }, trial.lines.map(([at, stage, text]) => el("li", null, el("span", { className: "num" }, `${at.toFixed(1)} s`), ` ${stage}: ${text}`))))));
    this.drawPositions(trial);
  }

  comparedWith(trial) {
    return this.context.study.baseline?.trial ?? trial.trial;
  }

  facts(trial) {
    const { study } = this.context;
    const best = study.recommended?.trial === trial;
    const fact = (value, text) => el("div", null, el("b", null, value), el("span", null, text));
    const at = study.about.pick.load ?? study.levels.at(-1);
    const point = study.point(trial.trial, at);
    return el("div", { className: "facts" },
      point && fact(times(point.speedup), `baseline at ${at} in flight`),
      study.objectives.map((o) => {
        const row = study.point(trial.trial, o.at);
        return row && fact(number(study.value(row, o.metric)), `${o.metric} (${study.metric(o.metric).unit}) at ${o.at}`);
      }),
      trial.begin !== null && fact(duration(trial.end - trial.begin), `from ${clock(trial.begin)}`),
      trial.gpus > 0 && fact(String(trial.gpus), trial.gpus === 1 ? "GPU" : "GPUs"),
      best && el("div", null, el("span", { className: "tag hot" }, "recommended")));
  }

  failure(trial) {
    const { failure } = trial;
    return el("section", { className: "panel", "aria-label": "Failure" }, el("header", null, el("h2", { className: "bad" }, failureText(this.context.study, trial))),
      el("div", { className: "body stack" },
        failure.advice && el("p", null, el("strong", null, "What to do: "), failure.advice),
        failure.evidence.length > 0 && el("div", null, el("h3", null, "Evidence"), el("pre", { tabIndex: 0, id: "evidence" }, failure.evidence.join("\n")))));
  }

  levels(rows, trial) {
    const { study } = this.context;
    const named = [...study.objectives.map((o) => o.metric), ...study.metrics.map((metric) => metric.name)];
    const names = [...new Set(named)].filter((name) => rows.some((row) => study.value(row, name) !== null));
    return el("div", { className: "scroll body" }, el("table", null,
      el("thead", null, el("tr", null, el("th", { className: "l" }, "metric"), el("th", { className: "l" }, "unit"), rows.map((row) => el("th", null, `${plural(row.concurrency, "request")} in flight`, el("small", null, `n = ${row.n}`))))),
      el("tbody", null,
        trial && trial.points.length > 0 && el("tr", null, el("td", { className: "l dim" }, "× baseline"), el("td"), rows.map((row) => {
          const point = study.point(trial.trial, row.concurrency);
          return el("td", null, times(point?.speedup), " ", point && pointTags(point).slice(0, 1));
        })),
        names.map((name) => el("tr", { title: study.metric(name).description }, el("td", { className: "l" }, name), el("td", { className: "l dim" }, study.metric(name).unit), rows.map((row) => {
          const interval = study.interval(row, name);
          return el("td", null, number(study.value(row, name)), interval && el("span", { className: "iv" }, `${number(interval[0])}–${number(interval[1])}`));
        }))))));
  }

  rounds(trial) {
    const counted = Object.entries(trial.server).filter(([, server]) => server?.seconds);
    if (counted.length === 0) return panel("Where a round's time goes", null, el("p", { className: "note" }, "The server did not report the seconds of its rounds."));
    const parts = PARTS.filter((part) => counted.some(([, server]) => server.seconds[part] > 0));
    const colour = (part) => token(`s${PARTS.indexOf(part)}`);
    return panel("Where a round's time goes", null,
      el("div", { className: "body bars", id: "rounds" }, counted.map(([level, server]) => {
        const total = parts.reduce((sum, part) => sum + (server.seconds[part] ?? 0), 0);
        return [el("span", { className: "num" }, `${level} in flight`),
          el("div", { className: "track", role: "img", "aria-label": parts.map((part) => `${part} ${percent(server.seconds[part] / total)}`).join(", ") },
            parts.map((part) => el("i", { title: `${PART_TITLES[part]}: ${percent(server.seconds[part] / total)}, ${perRound(server, part)}`, style: { width: `${(100 * (server.seconds[part] ?? 0)) / total}%`, background: colour(part) } }))),
          el("span", { className: "num dim" }, server.rounds ? `${number((1000 * total) / server.rounds)} ms/round` : duration(total))];
      })),
      el("div", { className: "legend" }, parts.map((part) => el("span", null, el("i", { style: { background: colour(part) } }), `${PART_TITLES[part]} ${percent(share(counted, part))}`))));
  }

  acceptance(trial) {
    const counted = Object.values(trial.server).filter((server) => server?.by_position);
    if (counted.length === 0) {
      return panel("Accepted by draft position", null, el("p", { className: "note" }, trial.kind === "none" ? "No drafts: every round yields one token." : "The server did not report acceptance by position."));
    }
    return panel("Accepted by draft position", null, this.positions.node, this.positionLegend = el("div", { className: "legend" }));
  }

  drawPositions(trial) {
    const counted = Object.entries(trial.server).filter(([, server]) => server?.by_position);
    if (counted.length === 0) return;
    const longest = Math.max(...counted.map(([, server]) => server.by_position.length));
    const colour = (i) => onRamp(counted.length > 1 ? i / (counted.length - 1) : 0.4);
    this.positions.draw({
      grid: { left: 58, right: 16, top: 10, bottom: 44 },
      xAxis: categoryAxis("x", "draft position", Array.from({ length: longest }, (_, i) => i + 1)),
      yAxis: valueAxis("y", "rounds that accept it (%)", { min: 0, max: 100, scale: false }),
      series: counted.map(([level, server], i) => ({ type: "bar", name: level, data: server.by_position.map((value) => 100 * value), itemStyle: { color: colour(i), borderRadius: [2, 2, 0, 0] }, barGap: "12%", barCategoryGap: "28%" })),
    });
    const { study } = this.context;
    fill(this.positionLegend, counted.map(([level], i) => {
      const length = study.value(study.rows(trial).find((row) => row.concurrency === Number(level)), "accept_length");
      return el("span", null, el("i", { style: { background: colour(i) } }), `${level} in flight: accept length ${number(length)}`);
    }));
  }

  headroom(trial) {
    const { headroom } = trial;
    if (!headroom) return panel("Headroom", null, el("p", { className: "note" }, "No estimate of what the machine could do."));
    if (headroom.unknown) return panel("Headroom", null, el("p", { className: "note", id: "headroom" }, `Unknown: ${headroom.unknown}.`));
    const known = Object.entries(headroom).filter(([, value]) => value && typeof value === "object");
    return panel("Headroom: share of the machine's roofline", null, el("div", { className: "body bars", id: "headroom" }, known.map(([level, { share: part, bound, tok_s_limit: limit }]) => [
      el("span", { className: "num" }, `${level} in flight`),
      el("div", { className: "track", role: "img", "aria-label": percent(part) }, el("i", { style: { width: `${Math.min(100, 100 * part)}%`, background: token("accent") } })),
      el("span", { className: "num dim" }, `${percent(part, 1)} of ${number(limit)} tokens/s, bound by ${bound}`)])));
  }

  parity(parity) {
    const found = [
      ["verdict", parity.verdict], ["texts judged", parity.texts], ["tokens judged", parity.positions], ["ties within the bound", parity.ties], ["tokens beyond it", parity.beyond],
      ["worst regret (nats)", parity.regret === null ? "–" : number(parity.regret)], ["bound (nats)", parity.bound === null ? "–" : number(parity.bound)],
      ["accept length over these texts", parity.accept_length === null ? "–" : number(parity.accept_length)]];
    return panel("Parity with no speculation", null, el("div", { className: "body stack" },
      el("div", { className: "facts", id: "parity" }, found.map(([name, value]) => el("div", null, el("b", null, String(value)), el("span", null, name)))),
      parity.why.length > 0 && el("p", { className: "note" }, parity.why.join("; "))));
  }

  configs(trial) {
    const { config, resolved } = trial;
    const paths = [...new Set([...Object.keys(config), ...Object.keys(resolved ?? {})])];
    return el("div", { className: "scroll body" }, el("table", { id: "resolved" },
      el("thead", null, el("tr", null, ["field", "asked", "runs"].map((text) => el("th", { className: "l" }, text)))),
      el("tbody", null, paths.map((path) => {
        const differs = resolved !== null && path in resolved;
        const asked = path in config ? shown(config[path]) : "";
        const runs = resolved === null ? "not reported" : shown(differs ? resolved[path] : config[path]);
        return el("tr", { className: differs && config[path] !== null && config[path] !== "auto" && path in config ? "differs" : "" },
          el("td", { className: "l mono" }, path), el("td", { className: "l wrap mono" }, asked), el("td", { className: `l wrap mono ${differs ? "" : "dim"}` }, runs));
      }))));
  }

  dispose() {
    this.positions.dispose();
    this.log.dispose();
  }
}

function perRound(server, part) {
  return server.rounds ? `${number((1000 * server.seconds[part]) / server.rounds)} ms/round` : duration(server.seconds[part]);
}

function share(counted, part) {
  const sum = (pick) => counted.reduce((total, [, server]) => total + pick(server), 0);
  return sum((server) => server.seconds[part] ?? 0) / sum((server) => PARTS.reduce((total, each) => total + (server.seconds[each] ?? 0), 0));
}

// The stages on one time axis; levels inside the load. `until`: seconds since the begin, for what still runs.
export function course(trial, until) {
  const segments = trial.segments;
  if (segments.length === 0) {
    const known = Object.entries(trial.seconds ?? {});
    return known.length === 0 ? el("p", { className: "dim" }, "Its course is not recorded.") : el("p", null, known.map(([stage, seconds]) => `${stage} ${duration(seconds)}`).join(" · "));
  }
  const total = Math.max(until ?? 0, ...segments.map(([, , from, to]) => to ?? from)) || 1;
  const stages = [...new Set(segments.map(([stage]) => stage))];
  const failedAt = trial.failure?.stage;
  return el("div", { className: "stages" }, stages.map((stage) => {
    const mine = segments.filter(([name]) => name === stage);
    const levels = mine.filter(([, level]) => level !== null);
    const shownSegments = levels.length > 0 ? levels : mine;
    const long = mine.filter(([, level]) => level === null).reduce((sum, [, , from, to]) => sum + ((to ?? until ?? from) - from), 0);
    return el("div", { className: "row" }, el("span", null, stage),
      el("div", { className: "lane" }, shownSegments.map(([, level, from, to]) => {
        const end = to ?? until ?? from;
        const kind = to === null ? "open" : failedAt === stage && level === null ? "failed" : level !== null ? "load" : "";
        return el("i", { className: kind, title: `${stage}${level === null ? "" : ` at ${plural(level, "request")}`}: ${duration(end - from)}`,
          style: { left: `${(100 * from) / total}%`, width: `${(100 * (end - from)) / total}%` } }, level === null ? "" : `c=${level}`);
      })),
      el("span", null, duration(long)));
  }), el("div", { className: "row dim" }, el("span", null, "total"), el("span"), el("span", null, duration(total))));
}
