// Where the document comes from: the dashboard's server, which tells what changes, or the page itself.

const RETRY = 2000; // ms

export async function openSource() {
  const embedded = document.getElementById("embedded");
  return embedded === null ? new Server() : new Embedded(await unpack(embedded.textContent));
}

async function unpack(base64) {
  const bytes = Uint8Array.from(atob(base64.trim()), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

class Embedded {
  constructor(study) {
    this.live = false;
    this.study = study;
  }

  async list() {
    return [{ id: this.study.name, running: false }];
  }

  async load() {
    return this.study;
  }

  follow() {}

  async log() {
    return null;
  }
}

class Server {
  constructor() {
    this.live = true;
    document.addEventListener("visibilitychange", () => this.reconnect());
  }

  async list() {
    return (await get("/api/studies")).studies;
  }

  async load(id) {
    this.id = id;
    return get(this.path());
  }

  path() {
    return `/api/studies/${encodeURIComponent(this.id)}`;
  }

  // Tell of changes: onChange(document), onLive(live), onAnew() when the document must be loaded again.
  // A page that nobody looks at holds no connection; when it is looked at again, it catches up.
  follow(version, handlers) {
    this.version = version;
    this.handlers = handlers;
    this.reconnect();
  }

  reconnect() {
    this.events?.close();
    clearTimeout(this.retry);
    if (document.hidden || this.handlers === undefined) return;
    this.events = new EventSource(`${this.path()}/events?since=${this.version}`);
    const on = (kind, handler) => this.events.addEventListener(kind, (event) => handler(JSON.parse(event.data)));
    on("delta", (changed) => { this.version = changed.version; this.handlers.onChange(changed); });
    on("live", (live) => this.handlers.onLive(live));
    on("anew", () => { this.events.close(); this.handlers.onAnew(); });
    this.events.onopen = () => this.handlers.onConnection(true);
    this.events.onerror = () => {
      this.events.close();
      this.handlers.onConnection(false);
      this.retry = setTimeout(() => this.reconnect(), RETRY);
    };
  }

  async log(trial, which, offset) {
    const response = await fetch(`${this.path()}/trials/${trial}/logs/${which}${offset === null ? "" : `?offset=${offset}`}`);
    return response.ok ? response.json() : null;
  }
}

async function get(path) {
  const response = await fetch(path, { headers: { accept: "application/json" } });
  const body = await response.text();
  if (!response.ok) {
    let reason = body;
    try { reason = JSON.parse(body).error; } catch { /* the text itself is the reason */ }
    throw new Error(reason);
  }
  return JSON.parse(body);
}
