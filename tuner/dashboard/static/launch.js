// A trial's launch file, and a command that anyone can paste: it writes the file and serves it.

const PLACEHOLDER = "LAUNCH_FILE";
const PLAIN = /^[A-Za-z_][A-Za-z0-9_./-]*$/;
const WORDS = new Set(["null", "true", "false", "yes", "no", "on", "off", "y", "n", "none"]);

// JSON is YAML; words that can mean nothing else go without quotes.
function scalar(value) {
  if (typeof value === "string" && PLAIN.test(value) && !WORDS.has(value.toLowerCase())) return value;
  return JSON.stringify(value);
}

function flow(value) {
  if (Array.isArray(value)) return `[${value.map(flow).join(", ")}]`;
  if (value !== null && typeof value === "object") {
    return `{${Object.entries(value).map(([key, item]) => `${scalar(key)}: ${flow(item)}`).join(", ")}}`;
  }
  return scalar(value);
}

// The nested configuration of a trial's dotted paths, without nulls: they are the defaults.
export function nested(config) {
  const root = {};
  for (const [path, value] of Object.entries(config)) {
    if (value === null) continue;
    const parts = path.split(".");
    const last = parts.pop();
    let at = root;
    for (const part of parts) {
      if (!Object.hasOwn(at, part)) Object.defineProperty(at, part, { value: {}, enumerable: true });
      at = at[part];
    }
    Object.defineProperty(at, last, { value, enumerable: true });
  }
  return root;
}

export function launchFile(study, trial) {
  const lines = ["schema: 1", "entries:", "- from: 1", "  config:"];
  for (const [section, value] of Object.entries(nested(trial.config))) lines.push(`    ${scalar(section)}: ${flow(value)}`);
  const expected = trial.points.filter((row) => row[5].some((low) => low !== null));
  if (expected.length > 0) {
    lines.push("expected:");
    for (const [concurrency, , , , , low, high] of expected) {
      const bounds = {};
      study.metrics.forEach((metric, i) => { if (low[i] !== null) bounds[metric.name] = [low[i], high[i]]; });
      lines.push(`  ${concurrency}: ${flow(bounds)}`);
    }
  }
  lines.push(`synthetic: ${trial.synthetic}`);
  lines.push(`study: ${flow({ name: study.name, trial: trial.trial, digest: study.about.digest })}`);
  return `${lines.join("\n")}\n`;
}

function shortFile(trial) {
  const lines = ["schema: 1", "entries:", "- config:"];
  for (const [section, value] of Object.entries(nested(trial.config))) lines.push(`    ${scalar(section)}: ${flow(value)}`);
  return lines.join("\n");
}

// No scalar holds a line break, so nothing in the file can end the here-document.
export function launchCommand(study, trial) {
  const file = `trial-${trial.trial}.yaml`;
  const serve = study.about.serve.replace(PLACEHOLDER, file);
  return `cat > ${file} <<'YAML'\n${shortFile(trial)}\nYAML\n${serve}`;
}
