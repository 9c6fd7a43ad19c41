// Colour by any parameter: a ramp for what is ordered, distinct colours for what is not. Never the only sign.

import { number, shown } from "./format.js";

export function token(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export function ramp() {
  return [0, 1, 2, 3, 4].map((i) => token(`r${i}`));
}

function channels(hex) {
  return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

function mixed(a, b, share) {
  const [x, y] = [channels(a), channels(b)];
  return `rgb(${x.map((value, i) => Math.round(value + (y[i] - value) * share)).join(",")})`;
}

export function onRamp(share, stops = ramp()) {
  const at = Math.min(1, Math.max(0, share)) * (stops.length - 1);
  const i = Math.min(stops.length - 2, Math.floor(at));
  return mixed(stops[i], stops[i + 1], at - i);
}

// What points may be coloured by: [key, title, value of a point].
export function colourings(study) {
  const params = study.about.domains.map((domain) => [
    `p:${domain.path}`, domain.path, (point) => point.trial.params[domain.path] ?? null,
  ]);
  const measured = ["accept_length", ...study.objectives.map((o) => o.metric)].map((name) => [
    `m:${name}`, study.axis(name), (point) => study.value(point, name),
  ]);
  return [["concurrency", "requests in flight", (point) => point.concurrency], ...params, ...measured];
}

// A colouring of values: {of(value), items: [[text, colour]] | null, ramp: [low, high] | null}.
export function colouring(values) {
  const known = values.filter((value) => value !== null);
  const distinct = [...new Set(known)];
  const absent = token("faint");
  if (distinct.every((value) => typeof value === "number")) {
    distinct.sort((a, b) => a - b);
    const stops = ramp();
    if (distinct.length > 8) {
      const [low, high] = [distinct[0], distinct.at(-1)];
      return {
        of: (value) => (value === null ? absent : onRamp((value - low) / (high - low), stops)),
        items: null, stops, ends: [number(low), number(high)],
      };
    }
    const last = Math.max(1, distinct.length - 1);
    const colours = new Map(distinct.map((value, i) => [value, onRamp(i / last, stops)]));
    return {
      of: (value) => colours.get(value) ?? absent,
      items: distinct.map((value) => [String(value), colours.get(value)]), stops: null, ends: null,
    };
  }
  const colours = new Map(distinct.slice(0, 7).map((value, i) => [value, token(`s${i}`)]));
  const rest = token("s7");
  return {
    of: (value) => (value === null ? absent : colours.get(value) ?? rest),
    items: [...colours].map(([value, colour]) => [shown(value), colour]), stops: null, ends: null,
  };
}
