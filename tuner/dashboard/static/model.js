// The study as the views use it: trials, points, front. Built from the document, kept up to date by its changes.

const FEASIBLE = 1;
const CONFIRMED = 2;

export class Study {
  constructor(document) {
    this.metrics = document.metrics;
    this.failures = document.failures;
    this.index = new Map(document.metrics.map((metric, i) => [metric.name, i]));
    this.leftOut = document.left_out ?? [];
    this.byNumber = new Map();
    this.apply(document);
  }

  // Take in a whole document, or one with only the trials that changed.
  apply(document) {
    this.version = document.version ?? this.version;
    this.name = document.study.name;
    this.about = document.study;
    this.derived = document.derived;
    this.live = document.live;
    for (const trial of document.trials) this.byNumber.set(trial.trial, trial);
    this.trials = [...this.byNumber.values()].sort((a, b) => a.trial - b.trial);
    const onFront = new Map(this.derived.front.map(([trial, c, ties, count]) => [`${trial}/${c}`, { ties, count }]));
    this.points = this.trials.flatMap((trial) => trial.points.map((row) => makePoint(trial, row, onFront)));
    this.byKey = new Map(this.points.map((point) => [point.key, point]));
    this.front = this.derived.front.map(([trial, c]) => this.byKey.get(`${trial}/${c}`)).filter(Boolean);
    this.failed = this.trials.filter((trial) => trial.failure !== null && trial.state !== "infeasible");
    const plain = this.trials.filter((trial) => trial.role === "baseline"); // two where the first could not capture its graphs
    this.baseline = plain.find((trial) => trial.points.length > 0) ?? plain[0] ?? null;
    this.levels = this.about.levels;
  }

  applyLive(live) {
    this.live = live;
  }

  get objectives() {
    return this.about.objectives;
  }

  metric(name) {
    return this.metrics[this.index.get(name)] ?? { name, unit: "", goal: "min", description: "" };
  }

  value(row, name) {
    return row?.values[this.index.get(name)] ?? null;
  }

  interval(row, name) {
    const i = this.index.get(name);
    const low = row?.low[i] ?? null;
    return low === null ? null : [low, row.high[i]];
  }

  // Axis title: name, unit, and which way is better.
  axis(name) {
    const metric = this.metric(name);
    return `${name} (${metric.unit})`;
  }

  better(name) {
    return this.metric(name).goal === "min" ? "lower is better" : "higher is better";
  }

  point(trial, concurrency) {
    return this.byKey.get(`${trial}/${concurrency}`) ?? null;
  }

  // A trial at a concurrency: its point, or what a repeat measured.
  at(trial, concurrency) {
    return this.point(trial.trial, concurrency) ?? this.rows(trial).find((row) => row.concurrency === concurrency) ?? null;
  }

  // What a trial itself measured, by concurrency; its points may hold the mean with its confirmation.
  rows(trial) {
    return (trial.levels ?? trial.points).map((row) => makeRow(row));
  }

  get recommended() {
    const best = this.derived.recommendation;
    return best === null ? null : this.point(best.trial, best.concurrency);
  }

  // Names of metrics that were measured at all, objectives first.
  measured() {
    const seen = new Set(this.objectives.map((objective) => objective.metric));
    for (const metric of this.metrics) {
      if (this.points.some((point) => this.value(point, metric.name) !== null)) seen.add(metric.name);
    }
    return [...seen];
  }

  kinds() {
    return [...new Set(this.trials.map((trial) => trial.kind))];
  }
}

export function makeRow([concurrency, n, flags, speedup, values, low, high]) {
  return {
    concurrency, n, speedup, values, low, high,
    feasible: (flags & FEASIBLE) !== 0,
    confirmed: (flags & CONFIRMED) !== 0,
  };
}

function makePoint(trial, row, onFront) {
  const key = `${trial.trial}/${row[0]}`;
  const place = onFront.get(key);
  return {
    ...makeRow(row), key, trial,
    front: place !== undefined,
    ties: place?.ties ?? [],
    tieCount: place?.count ?? 0,
    baseline: trial.role === "baseline",
  };
}

// Whether value a is better than b in a metric with this goal.
export function isBetter(goal, a, b) {
  return goal === "min" ? a < b : a > b;
}

// The best point of each concurrency among some, by a metric: Map of concurrency to point.
export function bestByLevel(study, points, metric) {
  const goal = study.metric(metric).goal;
  const best = new Map();
  for (const point of points) {
    const value = study.value(point, metric);
    if (value === null) continue;
    const before = best.get(point.concurrency);
    if (before === undefined || isBetter(goal, value, study.value(before, metric))) best.set(point.concurrency, point);
  }
  return best;
}

// Where a curve stops beating another, as [concurrency, +1 when it starts to win | -1 when it stops], between levels
// by straight lines of the logarithms. Both are arrays of [concurrency, value] with the same concurrencies.
export function crossings(curve, reference, goal) {
  const gains = curve.map(([c, value], i) => [c, Math.log(value / reference[i][1]) * (goal === "min" ? -1 : 1)]);
  const found = [];
  for (let i = 1; i < gains.length; i += 1) {
    const [c0, g0] = gains[i - 1];
    const [c1, g1] = gains[i];
    if (g0 > 0 === g1 > 0 || g0 === g1) continue;
    const share = g0 / (g0 - g1);
    found.push([Math.exp(Math.log(c0) + share * (Math.log(c1) - Math.log(c0))), g1 > 0 ? 1 : -1]);
  }
  return found;
}
