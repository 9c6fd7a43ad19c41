// The frame: which study, which view, light or dark; and what to do when the data changes.

import { CurvesView } from "./curves.js";
import { el, fill, say } from "./dom.js";
import { exportsOf } from "./exports.js";
import { FrontView } from "./front.js";
import { Study } from "./model.js";
import { StudyView } from "./overview.js";
import { ParallelView } from "./parallel.js";
import { emptyView } from "./parts.js";
import { openSource } from "./source.js";
import { TableView } from "./table.js";
import { TrialView } from "./trial.js";

const VIEWS = { front: FrontView, curves: CurvesView, parallel: ParallelView, trials: TableView, trial: TrialView, study: StudyView };
const TABS = [["front", "Front"], ["curves", "Curves"], ["parallel", "Parallel"], ["trials", "Trials"], ["study", "Study"]];
const STATES = { running: "running", finished: "finished", stopped: "stopped", died: "died", empty: "empty" };
const THEMES = ["auto", "light", "dark"];

class App {
  constructor(source) {
    this.source = source;
    this.kept = new Map();
    this.main = document.getElementById("main");
    this.bar = document.getElementById("bar");
  }

  async start() {
    this.studies = await this.source.list();
    addEventListener("hashchange", () => this.route());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.setTheme(theme()));
    document.addEventListener("keydown", (event) => this.key(event));
    await this.route();
  }

  // Addresses are #study/view/rest; every part is encoded.
  parts() {
    const [id, view, ...rest] = location.hash.slice(1).split("/").map(decode);
    return { id: id || this.studies[0]?.id, view: Object.hasOwn(VIEWS, view ?? "") ? view : "front", rest: rest.join("/") };
  }

  href(view, rest) {
    const parts = [this.id, view, ...(rest === undefined ? [] : [String(rest)])];
    return `#${parts.map(encodeURIComponent).join("/")}`;
  }

  go(view, rest) {
    location.hash = this.href(view, rest);
  }

  // Options of a view that outlive it.
  keep(name, defaults) {
    if (!this.kept.has(name)) this.kept.set(name, { ...defaults });
    return this.kept.get(name);
  }

  async route() {
    const { id, view, rest } = this.parts();
    if (id === undefined) {
      this.frame();
      fill(this.main, emptyView("No study here", "Start one with `tuner search`; it appears after a reload."));
      return;
    }
    if (id !== this.id) {
      this.id = id;
      this.kept.clear();
      await this.load();
      if (this.study === null) return;
    }
    this.rest = rest;
    this.show(view);
  }

  async load() {
    try {
      const document_ = await this.source.load(this.id);
      this.study = new Study(document_);
    } catch (error) {
      this.study = null;
      this.view?.dispose();
      this.view = null;
      this.frame();
      fill(this.main, emptyView("This study cannot be shown", error.message));
      return;
    }
    this.source.follow(this.study.version, {
      onChange: (changed) => this.changed(() => this.study.apply(changed)),
      onLive: (live) => this.wentOn(live),
      onAnew: () => this.anew(),
      onConnection: (open) => { if (this.connected !== open) { this.connected = open; this.frame(); } },
    });
  }

  async anew() {
    await this.load();
    if (this.study !== null) this.show(this.name);
  }

  show(name) {
    this.view?.dispose();
    this.name = name;
    const top = this.shownAs === location.hash ? scrollY : 0;
    this.shownAs = location.hash;
    this.frame();
    this.view = new VIEWS[name](this);
    fill(this.main, this.view.node);
    this.view.show();
    scrollTo(0, top);
    document.title = `${this.study.name} · ${TABS.find(([key]) => key === name)?.[1] ?? `Trial ${this.rest}`}`;
    document.documentElement.dataset.view = name;
    document.documentElement.dataset.trials = this.study.trials.length;
  }

  changed(apply) {
    apply();
    this.frame();
    this.view?.update();
    document.documentElement.dataset.trials = this.study.trials.length;
  }

  wentOn(live) {
    const before = this.study.live.state;
    this.study.applyLive(live);
    this.frame();
    this.view?.live?.();
    if (before !== live.state) say(`The study is ${live.state}`);
  }

  frame() {
    const { study } = this;
    const focused = this.bar.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    const state = study?.live.state;
    const current = this.name === "trial" ? "trials" : this.parts().view === "trial" ? "trials" : this.parts().view;
    const pill = this.source.live && this.connected === false
      ? el("span", { className: "pill died", title: "The dashboard's server does not answer; this is what it said last" }, "disconnected")
      : study && el("span", { className: `pill ${state}`, title: study.live.text }, STATES[state] ?? state, state === "running" ? ` · ${study.live.launched}${study.about.budget.trials ? `/${study.about.budget.trials}` : ""}` : null);
    fill(this.bar, el("div", { className: "bar" },
      el("div", { className: "brand" }, this.chooser(), pill),
      study && el("nav", { "aria-label": "Views" }, TABS.map(([key, title], i) => el("a", { href: this.href(key), data: { key }, title: `${title} (${i + 1})`, "aria-current": key === current ? "page" : null }, title))),
      el("span", { className: "spacer" }),
      study && el("span", { className: "machine", title: study.about.machine }, study.about.machine),
      study && this.exportMenu(), this.themeButton()));
    if (focused) this.bar.querySelector(`[data-key="${focused}"]`)?.focus();
  }

  chooser() {
    if (this.studies.length < 2) return el("h1", null, this.study?.name ?? this.id ?? "Tuner");
    const select = el("select", { "aria-label": "Study", data: { key: "chooser" }, on: { change: () => { location.hash = `#${encodeURIComponent(select.value)}/front`; } } },
      this.studies.map(({ id, running }) => el("option", { value: id, selected: id === this.id }, running ? `${id} (running)` : id)));
    return el("h1", null, select);
  }

  exportMenu() {
    const menu = el("details", { className: "menu" }, el("summary", { data: { key: "export" } }, "Export"),
      el("div", { className: "items" }, exportsOf(this.study).map(([title, text, run]) => el("button", { type: "button", on: { click: () => { run(); menu.open = false; } } }, title, el("small", null, text)))));
    return menu;
  }

  themeButton() {
    const now = chosenTheme();
    return el("button", { type: "button", className: "quiet", data: { key: "theme" }, title: "Light, dark, or as the system has it (t)", on: { click: () => this.nextTheme() } }, { auto: "◐ auto", light: "○ light", dark: "● dark" }[now]);
  }

  nextTheme() {
    const next = THEMES[(THEMES.indexOf(chosenTheme()) + 1) % THEMES.length];
    try { localStorage.setItem("theme", next); } catch { document.documentElement.dataset.chosen = next; }
    document.documentElement.dataset.chosen = next;
    this.setTheme(theme());
    this.frame();
  }

  setTheme(name) {
    if (document.documentElement.dataset.theme === name) return;
    document.documentElement.dataset.theme = name;
    if (this.study) this.show(this.name);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    if (event.key === "t") this.nextTheme();
    else if (event.key === "Escape") this.bar.querySelector("details[open]")?.removeAttribute("open");
    else if (event.key === "/") { event.preventDefault(); this.go("trials"); requestAnimationFrame(() => document.querySelector('input[type="search"]')?.focus()); }
    else if (this.study && TABS[Number(event.key) - 1]) this.go(TABS[Number(event.key) - 1][0]);
  }
}

function decode(part) {
  try { return decodeURIComponent(part); } catch { return part; }
}

function chosenTheme() {
  let stored = document.documentElement.dataset.chosen ?? null;
  try { stored ??= localStorage.getItem("theme"); } catch { /* a page without storage starts as the system is */ }
  return THEMES.includes(stored) ? stored : "auto";
}

function theme() {
  const chosen = chosenTheme();
  return chosen !== "auto" ? chosen : matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

document.documentElement.dataset.theme = theme();
const app = new App(await openSource());
await app.start();
performance.mark("drawn");
