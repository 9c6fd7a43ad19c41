// Numbers, durations and names as people read them. Mirrors tuner/labels.py and tuner/durations.py.

export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 100) return Math.round(value).toLocaleString("en-US").replaceAll(",", "\u2009");
  if (size >= 10) return value.toFixed(1);
  return size >= 1 || size === 0 ? value.toFixed(2) : value.toFixed(3);
}

export function withInterval(value, low, high) {
  if (value === null || low === null || low === undefined) return number(value);
  return `${number(value)} [${number(low)}–${number(high)}]`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  return `${Math.floor(whole / 3600)} h ${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")} min`;
}

export function percent(share, places = 0) {
  return share === null || share === undefined ? "–" : `${(100 * share).toFixed(places)} %`;
}

export function times(value) {
  return value === null || value === undefined ? "–" : `${value.toFixed(2)}×`;
}

export function clock(unix) {
  return new Date(unix * 1000).toLocaleString("sv-SE").slice(0, 19);
}

export function shown(value) {
  if (value === null || value === undefined) return "default";
  if (value === true) return "yes";
  if (value === false) return "no";
  if (Array.isArray(value)) return value.map(shown).join("/");
  if (typeof value === "object") return JSON.stringify(value);
  return String(value);
}

export function plural(count, word) {
  return `${count} ${word}${count === 1 ? "" : "s"}`;
}

export function lastPart(path) {
  return path.slice(path.lastIndexOf(".") + 1);
}
