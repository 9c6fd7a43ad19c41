// Elements as nested calls. Text becomes text nodes, never markup: nothing here parses HTML.

export function el(name, attributes, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "on") for (const [type, handler] of Object.entries(value)) node.addEventListener(type, handler);
    else if (key === "style") Object.assign(node.style, value);
    else if (key === "data") Object.assign(node.dataset, value);
    else if (key in node && key !== "list" && typeof node[key] !== "object") node[key] = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  put(node, children);
  return node;
}

export function put(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : String(child));
  }
  return node;
}

export function fill(node, ...children) {
  node.replaceChildren();
  return put(node, children);
}

const OUTLINES = {
  none: "M8 2.2a5.8 5.8 0 1 0 .01 0Z",
  dflash: "M8 1.6 14.6 13.2H1.4Z",
  ddtree: "M8 .9 15.1 8 8 15.1.9 8Z",
  policy: "M2.4 2.4H13.6V13.6H2.4Z",
  other: "M8 1l2 4.7 5 .4-3.8 3.3 1.2 5L8 11.7 3.6 14.4l1.2-5L1 6.1l5-.4Z",
  failed: "M3 1.6 8 6.6 13 1.6 14.4 3 9.4 8 14.4 13 13 14.4 8 9.4 3 14.4 1.6 13 6.6 8 1.6 3Z",
};

export function outline(kind) {
  return OUTLINES[kind] ?? OUTLINES.other;
}

export function symbol(kind, { hollow = false, colour = null } = {}) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("viewBox", "0 0 16 16");
  svg.setAttribute("class", "sym");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(space, "path");
  path.setAttribute("d", outline(kind));
  path.setAttribute("fill", hollow ? "none" : "currentColor");
  path.setAttribute("stroke", "currentColor");
  path.setAttribute("stroke-width", hollow ? "1.8" : "0");
  if (colour !== null) svg.style.color = colour;
  svg.append(path);
  return svg;
}

export function choose(label, options, value, changed) {
  const select = el("select", { on: { change: () => changed(select.value) } },
    options.map(([key, text]) => el("option", { value: key, selected: key === value }, text)));
  return el("label", { className: "field" }, label, select);
}

export function tick(label, value, changed) {
  const box = el("input", { type: "checkbox", checked: value, on: { change: () => changed(box.checked) } });
  return el("label", { className: "check" }, box, label);
}

export function say(text) {
  fill(document.getElementById("said"), text);
}

export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // No clipboard for this page (a file, or not localhost): the old way works there.
    const area = el("textarea", { value: text, className: "unseen" });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const before = button.textContent;
  button.textContent = "Copied";
  say("Copied");
  setTimeout(() => { button.textContent = before; }, 1200);
}

export function command(text, oneLine = false) {
  return el("div", { className: oneLine ? "command line" : "command" },
    el("pre", { tabIndex: 0 }, text),
    el("button", { type: "button", on: { click: (event) => copy(text, event.currentTarget) } }, "Copy"));
}

export function save(name, type, text) {
  const link = el("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
