// The end of a trial's log, followed while it grows. What a server prints is text and stays text.

import { el, fill, tick } from "./dom.js";

const EVERY = 1000; // ms
const MOST = 400_000; // characters kept

export class LogTail {
  constructor(context, trial, live) {
    this.context = context;
    this.trial = trial;
    this.live = live;
    this.which = "server";
    this.follow = true;
    this.text = el("pre", { tabIndex: 0, "aria-label": "Log" });
    this.note = el("span", { className: "dim" });
    const button = (which) => el("button", { type: "button", "aria-pressed": String(which === this.which), on: { click: () => this.open(which) } }, which);
    this.buttons = { server: button("server"), worker: button("worker") };
    this.node = el("section", { className: "panel log" },
      el("header", null, el("h2", null, "Log"), this.note, el("div", { className: "controls" }, this.buttons.server, this.buttons.worker, tick("Follow", true, (value) => { this.follow = value; }))),
      el("div", { className: "body" }, this.text));
  }

  open(which) {
    this.which = which;
    for (const [name, button] of Object.entries(this.buttons)) button.setAttribute("aria-pressed", String(name === which));
    this.end = null;
    this.text.textContent = "";
    clearTimeout(this.timer);
    this.resting = false;
    this.read(++this.turn);
  }

  // Read on if nothing was written any more when the log was read last, and now something may be.
  wake() {
    if (this.resting && this.live()) this.read(this.turn);
  }

  start() {
    this.turn = 0;
    this.open("server");
  }

  async read(turn) {
    this.resting = false;
    const piece = await this.context.source.log(this.trial, this.which, this.end);
    if (turn !== this.turn) return;
    if (piece === null) {
      fill(this.note, this.context.source.live ? "not here (any more)" : "logs are not part of the report");
    } else {
      if (this.end === null && piece.start > 0) this.text.textContent = `… ${piece.start} bytes before\n`;
      else if (this.end !== null && piece.start !== this.end) this.text.textContent = "";
      this.end = piece.end;
      if (piece.text !== "") {
        this.text.append(piece.text);
        if (this.text.textContent.length > MOST) this.text.textContent = this.text.textContent.slice(-MOST / 2);
        if (this.follow) this.text.scrollTop = this.text.scrollHeight;
      }
      fill(this.note, this.live() ? "live" : "");
    }
    if (!this.live()) this.resting = true;
    else if (!document.hidden) this.timer = setTimeout(() => this.read(turn), EVERY);
    else document.addEventListener("visibilitychange", () => { if (turn === this.turn) this.read(turn); }, { once: true });
  }

  dispose() {
    this.turn += 1;
    clearTimeout(this.timer);
  }
}
