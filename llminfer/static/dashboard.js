// One renderer of an engine's event log, for every host: a page, an iframe, a notebook widget, a server that streams. No dependencies.
const PALETTE = ["#E69F00", "#56B4E9", "#009E73", "#F0E442", "#CC79A7", "#D55E00", "#7FA8D9"]; // after Okabe and Ito
const INK = "#111",
  KEY_EVERY = 128;
const num = n => Math.round(n).toLocaleString("en"),
  ms = x => (x >= 1000 ? (x / 1000).toFixed(2) + " s" : x >= 10 ? x.toFixed(0) + " ms" : x.toFixed(2) + " ms");
const many = (n, one, more) => `${num(n)} ${n === 1 ? one : more || one + "s"}`;
function ranges(ids, most = 12) {
  const runs = [];
  for (const b of ids) {
    const r = runs[runs.length - 1];
    if (r && b === r[1] + 1) r[1] = b;
    else runs.push([b, b]);
  }
  return (
    runs
      .slice(0, most)
      .map(([a, z]) => (a === z ? `${a}` : `${a}–${z}`))
      .join(", ") + (runs.length > most ? ", …" : "")
  );
}
const blocks = ids => (ids.length === 1 ? "block " : "blocks ") + ranges(ids, 6);

// --- the log: events -> frames, and the state after any frame ------------------------------------------------------------------------
export class Log {
  constructor() {
    this.clear();
  }
  clear() {
    Object.assign(this, {
      events: [],
      frames: [],
      seqs: [],
      now: new Map(),
      size: 0,
      nBlocks: 0,
      rows: 0,
      top: 0,
      open: 0,
      ends: false,
      keys: [],
      live: fresh(),
      lanes: [],
      nTokens: 0,
      nPreempt: 0,
      nCached: 0,
      nPrompt: 0,
      changed: 0,
      laneOpen: [],
    });
  }
  static parse(text) {
    const out = [];
    text.split("\n").forEach((line, i) => {
      if (!line.trim()) return;
      let e;
      try {
        e = JSON.parse(line);
      } catch {
        throw new Error(`line ${i + 1} is not JSON: ${line.slice(0, 60)}`);
      }
      if (e.schema_version !== undefined)
        throw new Error("this is a trace of schema " + e.schema_version + ": convert it with `llminfer trace FILE --html OUT`");
      if (typeof e.event !== "string" || typeof e.t !== "number")
        throw new Error(`line ${i + 1} is no event: an event has "event" and "t"`);
      if (e.event === "start" && e.schema > 1) throw new Error(`line ${i + 1}: schema ${e.schema} is newer than this page, which reads 1`);
      out.push(e);
    });
    return out;
  }
  append(events) {
    for (const e of events) {
      if (this.ends && !["finish", "free", "first_token"].includes(e.event)) this.close();
      this.note(e);
      this.live.apply(e, this);
      this.events.push(e);
      if (e.event === "step") {
        this.ends = true;
        this.step = e;
      }
    }
    this.changed++;
  }
  finish() {
    if (this.ends) this.close();
  }
  close() {
    // a frame: everything up to a step, and what followed from it
    const e = this.step,
      n = this.frames.length;
    this.frames.push({
      from: this.open,
      to: this.events.length,
      t: e.t,
      ms: e.ms,
      tokens: e.tokens,
      prompt: e.prefill || 0,
      batch: e.batch,
      running: e.running,
      waiting: e.waiting,
      used: e.used,
      cached: e.cached,
      total: this.nTokens,
      preempted: this.nPreempt,
      hit: this.nCached,
    });
    this.open = this.events.length;
    this.ends = false;
    if ((n + 1) % KEY_EVERY === 0) this.keys.push(this.live.copy());
  }
  seq(id, e) {
    let s = this.now.get(id);
    if (!s) {
      s = {
        id,
        index: this.seqs.length,
        prompt: 0,
        limit: 0,
        from: this.frames.length,
        to: -1,
        t: e.t,
        first: 0,
        reason: "",
        runs: [],
        tok: [],
        cum: [],
        done: 0,
        row: -1,
        cached: 0,
        preempts: 0,
        lane: 0,
      };
      s.colour = PALETTE[s.index % PALETTE.length];
      let lane = this.laneOpen.findIndex(x => x < s.from - 1);
      if (lane < 0) lane = this.laneOpen.length;
      this.laneOpen[lane] = Infinity;
      s.lane = lane;
      this.seqs.push(s);
      this.now.set(id, s);
    }
    return s;
  }
  to(s, state) {
    const r = s.runs[s.runs.length - 1],
      f = this.frames.length;
    if (r && r[1] === state) return;
    if (r && r[0] === f) {
      r[1] = state;
      return;
    }
    s.runs.push([f, state]);
  }
  note(e) {
    // what is known of each request, over all frames
    const f = this.frames.length;
    switch (e.event) {
      case "start":
        this.now.clear();
        this.size = e.block_size;
        this.nBlocks = e.n_blocks;
        this.rows = e.max_num_seqs;
        break;
      case "snapshot":
        this.size = e.block_size;
        this.nBlocks = e.n_blocks;
        for (const r of e.tables) for (const b of r[4]) if (b > this.top) this.top = b;
        for (const [id, row, prompt, n] of e.tables) {
          const s = this.seq(id, e);
          if (!s.runs.length) {
            s.prompt = prompt;
            s.row = row;
            s.read = n;
            s.done = Math.max(0, n - prompt);
            this.to(s, "decode");
          }
        }
        break;
      case "arrive": {
        this.now.delete(e.seq);
        const s = this.seq(e.seq, e);
        Object.assign(s, {prompt: e.prompt, limit: e.limit, parent: e.parent, name: e.name});
        this.to(s, "queued");
        break;
      }
      case "admit":
      case "resume": {
        const s = this.seq(e.seq, e);
        s.row = e.row;
        if (e.event === "admit") {
          s.cached = e.cached;
          this.nCached += e.cached;
        }
        this.to(s, "prefill");
        break;
      }
      case "plan":
        for (const [, id] of e.rows) this.to(this.seq(id, e), "decode");
        for (const [, , , n] of e.prefill) this.nPrompt += n;
        break;
      case "first_token": {
        const s = this.seq(e.seq, e);
        s.first = e.t;
        this.to(s, "decode");
        break;
      }
      case "preempt": {
        const s = this.seq(e.seq, e);
        s.preempts++;
        this.nPreempt++;
        s.row = -1;
        this.to(s, "preempted");
        break;
      }
      case "step":
        for (const [id, n] of e.out) {
          const s = this.seq(id, e);
          s.done += n;
          s.tok.push(f);
          s.cum.push(s.done);
        }
        this.nTokens += e.tokens;
        break;
      case "finish": {
        const s = this.seq(e.seq, e);
        s.to = f;
        s.reason = e.reason;
        this.laneOpen[s.lane] = f;
        this.now.delete(e.seq);
        this.ended = (this.ended || 0) + 1;
        break;
      }
      case "alloc":
      case "share":
        for (const b of e.blocks) if (b > this.top) this.top = b;
        break;
    }
  }
  stateAt(f) {
    // replay from the nearest key frame
    let s, at;
    if (this.cursor && this.cursor.at <= f && this.cursor.at >= Math.floor((f + 1) / KEY_EVERY) * KEY_EVERY - 1) {
      s = this.cursor.s;
      at = this.cursor.at;
    } else {
      const k = Math.min(this.keys.length, Math.floor((f + 1) / KEY_EVERY));
      s = k ? this.keys[k - 1].copy() : fresh();
      at = k * KEY_EVERY - 1;
    }
    for (; at < f; at++) {
      const fr = this.frames[at + 1];
      for (let i = fr.from; i < fr.to; i++) s.apply(this.events[i], this);
    }
    this.cursor = {s, at: f};
    return s;
  }
  tokensAt(s, f) {
    let a = 0,
      b = s.tok.length;
    while (a < b) {
      const m = (a + b) >> 1;
      if (s.tok[m] <= f) a = m + 1;
      else b = m;
    }
    return a ? s.cum[a - 1] : 0;
  }
  stateOf(s, f) {
    if (s.to >= 0 && s.to < f) return "done";
    let out = "";
    for (const [at, st] of s.runs) {
      if (at > f) break;
      out = st;
    }
    return out;
  }
}
function fresh() {
  return new Held(new Map(), new Set(), new Map(), new Map());
}
class Held {
  // who holds which block
  constructor(tables, cached, drain, read) {
    Object.assign(this, {tables, cached, drain, read});
  }
  copy() {
    return new Held(
      new Map([...this.tables].map(([k, v]) => [k, v.slice()])),
      new Set(this.cached),
      new Map(this.drain),
      new Map(this.read),
    );
  }
  table(seq) {
    let t = this.tables.get(seq);
    if (!t) this.tables.set(seq, (t = []));
    return t;
  }
  apply(e) {
    switch (e.event) {
      case "start":
        this.tables.clear();
        this.cached.clear();
        this.drain.clear();
        this.read.clear();
        break;
      case "snapshot":
        this.tables = new Map(e.tables.map(r => [r[0], r[4].slice()]));
        this.cached = new Set(unpack(e.cached));
        for (const r of e.tables) this.read.set(r[0], r[3]);
        break;
      case "admit":
      case "resume":
        this.read.set(e.seq, e.cached);
        break;
      case "share":
      case "alloc": {
        const t = this.table(e.seq);
        for (const b of e.blocks) {
          t.push(b);
          this.cached.delete(b);
          this.drain.delete(b);
        }
        break;
      }
      case "evict":
        for (const b of e.blocks) this.cached.delete(b);
        break;
      case "plan":
        for (const [, seq, start, n] of e.prefill) this.read.set(seq, start + n);
        break;
      case "step":
        for (const [seq, n] of e.out) this.read.set(seq, (this.read.get(seq) || 0) + n);
        if (e.done) for (const [b, w] of this.drain) if (w <= e.window_id) this.drain.delete(b);
        break;
      case "free":
        this.tables.delete(e.seq);
        this.read.delete(e.seq);
        for (const b of e.cached) this.cached.add(b);
        if (e.fence) for (const b of e.blocks) this.drain.set(b, e.fence);
        break;
    }
  }
}
function unpack(runs) {
  const out = [];
  for (const [a, z] of runs) for (let b = a; b <= z; b++) out.push(b);
  return out;
}

// --- words -----------------------------------------------------------------------------------------------------------------------------
const WHY = {stop: "it said its end", length: "it reached its limit", abort: "its caller went away", error: "something failed"};
export function words(log, f) {
  // the frame in sentences: [request record or null, text]
  const fr = log.frames[f],
    out = [],
    before = f > 0 ? new Map([...log.stateAt(f - 1).tables].map(([k, v]) => [k, v.slice()])) : new Map(),
    find = (id, after) => {
      let best = null;
      for (const s of log.seqs) if (s.id === id && s.from <= f) best = s;
      return best || {id, prompt: 0};
    },
    who = s => s.name || "Request " + s.id;
  const freed = new Map();
  for (let i = fr.from; i < fr.to; i++) if (log.events[i].event === "free") freed.set(log.events[i].seq, log.events[i]);
  for (let i = fr.from; i < fr.to; i++) {
    const e = log.events[i],
      s = e.seq === undefined ? null : find(e.seq),
      name = s && who(s);
    if (e.event === "start")
      out.push([null, `An engine starts: ${many(e.n_blocks - 1, "block")} of ${e.block_size} tokens, ${many(e.max_num_seqs, "row")}.`]);
    if (e.event === "arrive")
      out.push([
        s,
        `${name} arrives with ${many(e.prompt, "prompt token")}; it may grow to ${num(e.limit)}${e.parent === undefined || e.parent === null ? "" : `, a sample of request ${e.parent}`}.`,
      ]);
    if (e.event === "admit")
      out.push([
        s,
        `${name} gets row ${e.row}${e.cached ? `: ${num(e.cached)} of its ${num(e.n)} tokens need no computing, their KV is in the cache` : ""}.`,
      ]);
    if (e.event === "resume")
      out.push([s, `${name} comes back on row ${e.row}: ${num(e.n - e.cached)} of its ${num(e.n)} tokens must be computed again.`]);
    if (e.event === "share")
      out.push([
        s,
        `${name} uses ${blocks(e.blocks)} together with others, or as the cache kept ${e.blocks.length === 1 ? "it" : "them"}.`,
      ]);
    if (e.event === "alloc") {
      const had = before.get(e.seq);
      out.push([
        s,
        `${name} got ${blocks(e.blocks)}` +
          (had && had.length && e.blocks.length === 1 ? `: the ${log.size} slots of block ${had[had.length - 1]} are full.` : "."),
      ]);
      before.set(e.seq, [...(had || []), ...e.blocks]);
    }
    if (e.event === "evict") out.push([null, `The cache gave up ${blocks(e.blocks)}: somebody needed room.`]);
    if (e.event === "cow") out.push([s, `Block ${e.src} is copied to ${e.dst}: ${name.toLowerCase()} will write there.`]);
    if (e.event === "plan")
      for (const [, id, start, n] of e.prefill) {
        const p = find(id);
        out.push([p, `${who(p)} reads tokens ${num(start)} to ${num(start + n - 1)} of ${num(Math.max(p.prompt, start + n))}.`]);
      }
    if (e.event === "first_token") out.push([s, `${name} shows its first token${s.t ? `, ${ms((e.t - s.t) * 1e3)} after it came` : ""}.`]);
    if (e.event === "preempt")
      out.push([s, `${name} is sent back to the queue: the pool has no block left. ${many(e.blocks, "block")} to others.`]);
    if (e.event === "finish") {
      const g = freed.get(e.seq);
      out.push([
        s,
        `${name} ends after ${many(e.tokens, "token")}: ${WHY[e.reason] || e.reason}.` +
          (g ? ` ${num(g.blocks.length)} of its blocks become free, ${num(g.cached.length)} stay cached.` : ""),
      ]);
    }
  }
  const head =
    `${many(fr.batch, "row")} worked for ${ms(fr.ms)}: ${many(fr.tokens, "new token")}` +
    (fr.prompt ? `, ${many(fr.prompt, "prompt token")} read` : "") +
    ".";
  return [[null, head], ...out];
}

// --- the look --------------------------------------------------------------------------------------------------------------------------
const CSS = `
:host { display: block; container-type: inline-size; color-scheme: light dark;
  --bg: #f7f7f5; --surface: #ffffff; --line: #e2e2dd; --strong: #8b9298; --text: #1c1f22; --muted: #5a6169; --accent: #00629b; --accent-ink: #fff; --soft: #e9f1f6; --rest: #ededea; --bad: #b3261e; --hot: #c2410c;
  --sans: ui-sans-serif, system-ui, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", sans-serif; --mono: ui-monospace, "SF Mono", "Cascadia Mono", "DejaVu Sans Mono", Menlo, Consolas, monospace; }
:host([data-theme=dark]) { color-scheme: dark; --bg: #131517; --surface: #191c1f; --line: #2e3338; --strong: #77818a; --text: #e7e9ea; --muted: #a2abb3; --accent: #6cbdf0; --accent-ink: #06202f; --soft: #1c2b36; --rest: #262b30; --bad: #ff9a90; --hot: #ff9e64; }
* { box-sizing: border-box; }
.dash { font: 14px/1.5 var(--sans); color: var(--text); background: var(--bg); padding: 14px; border-radius: 12px; display: grid; gap: 10px; grid-template-columns: minmax(0, 1fr); font-variant-numeric: tabular-nums; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(104px, 1fr)); gap: 1px; background: var(--surface); border: 1px solid var(--line); border-radius: 10px; overflow: hidden; }
.tiles div { box-shadow: 0 0 0 1px var(--line); padding: 7px 12px 8px; } .tiles b { display: block; font-size: 19px; font-weight: 620; letter-spacing: -.02em; line-height: 1.25; white-space: nowrap; } .tiles span { color: var(--muted); font-size: 12px; white-space: nowrap; }
.bar { display: flex; flex-wrap: wrap; align-items: center; gap: 8px; }
button, select, .file { font: inherit; color: inherit; background: var(--surface); border: 1px solid var(--strong); border-radius: 8px; padding: 4px 11px; min-height: 34px; cursor: pointer; }
button:hover, .file:hover { background: var(--soft); } button.main { background: var(--accent); color: var(--accent-ink); border-color: var(--accent); min-width: 76px; font-weight: 600; }
:focus-visible, .file:focus-within { outline: 2px solid var(--accent); outline-offset: 2px; }
label.pick { color: var(--muted); font-size: 12.5px; display: inline-flex; align-items: center; gap: 6px; } label.pick select { color: var(--text); padding: 4px 6px; }
.file input { position: absolute; width: 1px; height: 1px; opacity: 0; }
input[type=range] { flex: 1 1 200px; min-width: 120px; accent-color: var(--accent); height: 34px; margin: 0; cursor: pointer; }
.two { display: grid; gap: 10px; grid-template-columns: minmax(0, 1fr); }
section { background: var(--surface); border: 1px solid var(--line); border-radius: 10px; padding: 10px 12px 12px; min-width: 0; position: relative; }
h2 { font-size: 13px; font-weight: 620; margin: 0 0 6px; display: flex; justify-content: space-between; gap: 10px; flex-wrap: wrap; } h2 small { color: var(--muted); font-weight: 400; font-size: 12.5px; }
canvas { display: block; width: 100%; touch-action: pan-y; }
.say { margin: 0; padding: 0; list-style: none; font-size: 13.5px; } .say li { padding: 3px 0 3px 18px; position: relative; line-height: 1.4; } .say li:first-child { font-weight: 600; padding-left: 0; }
.say i { position: absolute; left: 1px; top: 8px; width: 10px; height: 10px; border-radius: 3px; border: 1px solid #8888; } .say .none { left: 4px; width: 4px; height: 4px; top: 11px; background: var(--strong); border: 0; border-radius: 50%; }
@container (max-width: 759px) { .say { height: 112px; overflow-y: auto; } }
h3 { font-size: 12px; color: var(--muted); font-weight: 500; margin: 10px 0 3px; } .here { margin: 0; padding: 0; list-style: none; } .here button { display: grid; grid-template-columns: 12px minmax(64px, auto) minmax(40px, 1fr) auto; align-items: center; gap: 8px; width: 100%; text-align: left; border: 0; background: none; padding: 2px 4px; min-height: 26px; font-size: 12.5px; border-radius: 6px; }
.here button[aria-pressed=true] { background: var(--soft); font-weight: 600; } .here i { width: 11px; height: 11px; border-radius: 3px; } .here .done { height: 5px; border-radius: 3px; background: var(--rest); overflow: hidden; } .here .done u { display: block; height: 100%; border-radius: 3px; } .here em { font-style: normal; color: var(--muted); }
.legend { display: flex; flex-wrap: wrap; gap: 3px 14px; color: var(--muted); font-size: 12px; margin: 8px 0 0; padding: 0; list-style: none; } .legend li { display: inline-flex; align-items: center; gap: 6px; } .legend svg { width: 22px; height: 14px; flex: none; }
.tip { position: absolute; z-index: 3; pointer-events: none; background: var(--text); color: var(--bg); font-size: 12px; line-height: 1.35; padding: 5px 9px; border-radius: 7px; max-width: 260px; }
.pin { background: var(--soft); border-radius: 8px; padding: 6px 10px; margin: 0 0 6px; font-size: 13px; display: flex; gap: 8px; align-items: start; justify-content: space-between; } .pin button { min-height: 0; padding: 1px 9px; font-size: 12px; flex: none; }
details { font-size: 13px; } summary { cursor: pointer; font-weight: 620; padding: 2px 0; } .wrap { overflow-x: auto; margin-top: 8px; } table { border-collapse: collapse; width: 100%; } caption { text-align: left; color: var(--muted); padding-bottom: 4px; }
th, td { text-align: left; padding: 3px 14px 3px 0; border-bottom: 1px solid var(--line); white-space: nowrap; } td.ids { white-space: normal; min-width: 110px; } th { font-weight: 600; }
.door { display: flex; flex-wrap: wrap; align-items: center; gap: 8px 12px; background: var(--soft); border: 2px solid var(--accent); border-radius: 10px; padding: 12px 14px; } .door input { font: inherit; color: inherit; background: var(--surface); border: 1px solid var(--strong); border-radius: 8px; padding: 4px 10px; min-height: 34px; width: 260px; max-width: 100%; } .door label { font-weight: 620; display: flex; flex-wrap: wrap; align-items: center; gap: 4px 8px; }
.error, .door .why { color: var(--bad); font-weight: 600; } .door .why:empty { display: none; } [hidden] { display: none !important; } .sr { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
.drop { outline: 3px dashed var(--accent); outline-offset: -6px; } .empty { padding: 40px 12px; text-align: center; color: var(--muted); }
@container (min-width: 760px) { .two { grid-template-columns: minmax(0, 1.65fr) minmax(260px, 1fr); } .two section { min-height: 348px; } .words { position: absolute; inset: 36px 12px 10px; overflow-y: auto; } }
@container (max-width: 800px) { .tiles { grid-template-columns: repeat(4, minmax(0, 1fr)); } .tiles div:last-child { grid-column: span 2; } }
@container (max-width: 480px) { .dash { padding: 8px; gap: 8px; } .tiles span { font-size: 11px; white-space: normal; line-height: 1.25; display: block; } .tiles div { padding: 5px 8px; } .tiles b { font-size: 16px; } input[type=range] { order: 9; flex-basis: 100%; } }
@media (prefers-reduced-motion: no-preference) { button { transition: background .12s; } }`;
const swatch = body => `<svg viewBox="0 0 22 14" aria-hidden="true">${body}</svg>`;
const LEGEND_KV = [
  [
    "<rect x='4' y='0' width='14' height='14' rx='3' fill='#56B4E9' fill-opacity='.3'/><rect x='4' y='5' width='14' height='9' rx='2' fill='#56B4E9'/>",
    "one request, and how full",
  ],
  [
    "<defs><pattern id='p' width='6' height='6' patternUnits='userSpaceOnUse' patternTransform='rotate(45)'><rect width='6' height='6' fill='#E69F00'/><rect width='3' height='6' fill='#009E73'/></pattern></defs><rect x='4' width='14' height='14' rx='3' fill='url(#p)'/>",
    "shared",
  ],
  ["<rect x='5' y='1' width='12' height='12' rx='3' fill='none' stroke='currentColor' stroke-width='1.6'/>", "cached, nobody's"],
  ["<rect x='4' width='14' height='14' rx='3' fill='currentColor' fill-opacity='.12'/>", "free"],
  ["<rect x='4' y='0' width='14' height='14' rx='3' fill='none' stroke='currentColor' stroke-dasharray='2 2'/>", "in a window's hands"],
  ["<rect x='5' y='1' width='12' height='12' rx='3' fill='#56B4E9' stroke='var(--text)' stroke-width='2.4'/>", "new in this step"],
];
const LEGEND_REQ = [
  ["<path d='M1 7h20' stroke='currentColor' stroke-width='1.5'/>", "queued"],
  [
    "<rect x='1' y='2' width='20' height='10' fill='#56B4E9' fill-opacity='.35'/><path d='M4 12L14 2M10 12L20 2' stroke='#56B4E9' stroke-width='1.5'/>",
    "prefill",
  ],
  ["<rect x='1' y='2' width='20' height='10' rx='2' fill='#56B4E9'/>", "decode"],
  ["<path d='M1 7h20' stroke='var(--hot)' stroke-width='2.5' stroke-dasharray='4 3'/>", "preempted"],
  ["<path d='M11 2v10' stroke='currentColor' stroke-width='2.5'/>", "end"],
];
const legend = rows => `<ul class="legend">${rows.map(([s, t]) => `<li>${swatch(s)}${t}</li>`).join("")}</ul>`;
const HTML = `<div class="dash" role="region" aria-label="Replay of an engine's event log">
<form class="door" hidden><label>API key of this server <input type="password" autocomplete="off" required></label><button class="main">Watch</button><span class="why" role="alert"></span></form>
<div class="tiles" aria-hidden="true"></div>
<div class="bar"><button class="main play" type="button">Play</button><button class="back" type="button" aria-label="One step back">‹</button><button class="on" type="button" aria-label="One step on">›</button>
<input type="range" class="scrub" min="0" max="0" value="0" step="1" aria-label="Step">
<label class="pick">speed <select class="speed"><option value="2">2/s</option><option value="10" selected>10/s</option><option value="40">40/s</option><option value="200">200/s</option></select></label>
<label class="pick">show <select class="span"><option value="0">all steps</option><option value="1000">1,000</option><option value="200">200</option><option value="60">60</option></select></label>
<label class="file">Load JSONL<input type="file" accept=".jsonl,.json,.txt" aria-label="Load a trace file"></label><span class="feed pick"></span></div>
<p class="error" role="alert" hidden></p>
<div class="two"><section aria-label="KV blocks"><h2>KV blocks <small class="kv-note"></small></h2><canvas class="kv" role="img"></canvas>${legend(LEGEND_KV)}</section>
<section aria-label="This step in words"><h2><span class="title">Step</span> <small class="time"></small></h2><div class="words" tabindex="0"><div class="pin" hidden></div><ul class="say"></ul><h3></h3><ul class="here"></ul></div></section></div>
<section aria-label="Throughput and batch size"><h2>Throughput and batch <small class="rate-note"></small></h2><canvas class="rate" role="img"></canvas></section>
<section aria-label="Requests over time"><h2>Requests <small class="req-note"></small></h2><canvas class="req" role="img"></canvas>${legend(LEGEND_REQ)}</section>
<details><summary>This step as a table</summary><div class="wrap"><table></table></div></details><p class="sr" aria-live="polite"></p></div>`;

// --- the view --------------------------------------------------------------------------------------------------------------------------
export class Dashboard {
  constructor(el, {theme} = {}) {
    this.log = new Log();
    this.at = 0;
    this.pinned = null;
    this.playing = false;
    this.follow = false;
    this.due = 0;
    this.el = el;
    const root = (this.root = el.shadowRoot || el.attachShadow({mode: "open"}));
    root.innerHTML = `<style>${CSS}</style>${HTML}`;
    this.$ = q => root.querySelector(q);
    this.layers = {};
    const dark = matchMedia("(prefers-color-scheme: dark)"),
      paint = () => {
        el.dataset.theme =
          theme ||
          (document.body && document.body.dataset.jpThemeLight === "false"
            ? "dark"
            : document.body && document.body.dataset.jpThemeLight === "true"
              ? "light"
              : dark.matches
                ? "dark"
                : "light");
        this.layers = {};
        this.draw();
      };
    dark.addEventListener("change", paint);
    this.$(".play").onclick = () => this.play(!this.playing);
    this.$(".back").onclick = () => this.go(this.at - 1, true);
    this.$(".on").onclick = () => this.go(this.at + 1, true);
    this.$(".scrub").oninput = e => this.go(+e.target.value);
    this.$(".scrub").onchange = () => this.tell();
    this.$(".span").onchange = () => {
      this.layers = {};
      this.draw();
    };
    this.$("input[type=file]").onchange = async e => {
      const field = e.target;
      await this.loadFile(field.files[0]);
      field.value = "";
    }; // the same file may be chosen again
    this.$("details").ontoggle = () => this.draw();
    const dash = this.$(".dash");
    dash.ondragover = e => {
      e.preventDefault();
      dash.classList.add("drop");
    };
    dash.ondragleave = () => dash.classList.remove("drop");
    dash.ondrop = e => {
      e.preventDefault();
      dash.classList.remove("drop");
      this.loadFile(e.dataTransfer.files[0]);
    };
    dash.onkeydown = e => {
      if (/^(INPUT|SELECT|BUTTON|SUMMARY)$/.test(e.target.tagName) && !(e.target.type === "range" && e.key === " ")) return;
      if (e.key === " ") {
        e.preventDefault();
        this.play(!this.playing);
      } else if (e.key === "ArrowRight") this.go(this.at + 1, true);
      else if (e.key === "ArrowLeft") this.go(this.at - 1, true);
    };
    for (const name of ["rate", "req"]) {
      const c = this.$("." + name);
      c.onpointerdown = e => {
        c.setPointerCapture(e.pointerId);
        this.drag = true;
        this.go(this.frameAt(c, e));
        if (name === "req") this.pin(this.laneAt(c, e));
      };
      c.onpointermove = e => {
        if (this.drag) this.go(this.frameAt(c, e));
        else this.hover(c, e, name === "req" ? this.laneWords(c, e) : this.rateWords(c, e));
      };
      c.onpointerup = c.onpointercancel = () => {
        this.drag = false;
        this.tell();
      };
      c.onpointerleave = () => this.hover(null);
    }
    const kv = this.$(".kv");
    kv.onpointermove = e => this.hover(kv, e, this.blockWords(this.blockAt(kv, e)));
    kv.onpointerleave = () => this.hover(null);
    kv.onclick = e => {
      const o = this.owners.get(this.blockAt(kv, e));
      this.pin(o ? this.recordOf(o[0]) : null);
    };
    this.watch = new ResizeObserver(() => {
      this.layers = {};
      this.draw();
    });
    this.watch.observe(el);
    paint();
  }
  load(events) {
    this.log.clear();
    this.log.cursor = null;
    this.log.append(events);
    this.log.finish();
    this.layers = {};
    this.pinned = null;
    this.ready();
    this.go(0);
  }
  append(events) {
    this.grow(() => this.log.append(events));
    clearTimeout(this.rest); // what follows from a step comes with it: after a silence it is whole
    this.rest = setTimeout(() => this.grow(() => this.log.finish()), 300);
  }
  grow(change) {
    // live: the cursor stays at the end if it was there
    const n = this.log.frames.length,
      end = this.at >= n - 1;
    change();
    if (this.log.frames.length === n) return;
    this.log.changed++;
    this.layers = {};
    this.ready();
    this.go(end && !this.playing ? this.log.frames.length - 1 : this.at);
  }
  ready() {
    const n = this.log.frames.length;
    this.$(".scrub").max = Math.max(0, n - 1);
    this.$(".scrub").disabled = n < 2;
  }
  async loadFile(file) {
    if (!file) return;
    try {
      const text = await file.text();
      this.load(Log.parse(text));
      this.fail("");
    } catch (e) {
      this.fail(`${file.name}: ${e.message}`);
    }
  }
  fail(text) {
    const p = this.$(".error");
    p.textContent = text;
    p.hidden = !text;
  }
  go(f, tell) {
    this.at = Math.max(0, Math.min(this.log.frames.length - 1, f));
    this.draw();
    if (tell) this.tell();
  }
  tell() {
    this.telling = true;
    this.draw();
  } // to a screen reader, once the step is drawn
  play(on) {
    if (on && this.at >= this.log.frames.length - 1) this.at = 0;
    this.playing = on;
    this.$(".play").textContent = on ? "Pause" : "Play";
    let last = performance.now(),
      rest = 0;
    const tick = now => {
      if (!this.playing || !this.el.isConnected) return;
      rest += ((now - last) / 1000) * +this.$(".speed").value;
      last = now;
      const n = Math.floor(rest);
      rest -= n;
      if (n) this.go(this.at + n);
      if (this.at >= this.log.frames.length - 1) return this.play(false);
      requestAnimationFrame(tick);
    };
    if (on) requestAnimationFrame(tick);
    else this.tell();
  }
  pin(s) {
    this.pinned = this.pinned === s ? null : s;
    this.layers = {};
    this.draw();
  }
  recordOf(id) {
    let best = null;
    for (const s of this.log.seqs) if (s.id === id && s.from <= this.at) best = s;
    return best;
  }
  draw() {
    if (this.due) return;
    this.due = requestAnimationFrame(() => {
      this.due = 0;
      this.paint();
    });
  }

  paint() {
    const {log} = this,
      n = log.frames.length;
    if (!this.el.isConnected) return;
    if (!n) {
      this.$(".title").textContent = "No step yet";
      this.$(".say").innerHTML = "<li>Load a trace, or wait for the engine's first step.</li>";
      return;
    }
    const t0 = performance.now(),
      f = Math.min(this.at, n - 1),
      fr = log.frames[f];
    this.css = getComputedStyle(this.el);
    this.c = k => this.css.getPropertyValue("--" + k).trim();
    const scrub = this.$(".scrub"),
      secs = fr.t - log.frames[0].t + log.frames[0].ms / 1e3;
    scrub.value = f;
    scrub.setAttribute("aria-valuetext", `step ${f + 1} of ${n}`);
    this.$(".title").textContent = `Step ${num(f + 1)} of ${num(n)}`;
    this.$(".time").textContent = `at ${secs < 10 ? secs.toFixed(3) : secs.toFixed(1)} s`;
    this.say(f);
    this.state = log.stateAt(f);
    this.owners = new Map();
    for (const [seq, t] of this.state.tables)
      for (const b of t) {
        const o = this.owners.get(b);
        if (o) o.push(seq);
        else this.owners.set(b, [seq]);
      }
    this.tiles(f, fr);
    this.kv(f, fr);
    this.rate(f);
    this.req(f);
    if (this.$("details").open) this.table(f);
    if (this.telling) {
      this.telling = false;
      this.$("p.sr").textContent =
        this.$(".title").textContent +
        ". " +
        [...this.$(".say").children]
          .slice(0, 6)
          .map(x => x.textContent)
          .join(" ");
    }
    this.took = performance.now() - t0;
  }
  tiles(f, fr) {
    const a = Math.max(0, f - 9),
      part = this.log.frames.slice(a, f + 1),
      busy = part.reduce((x, p) => x + p.ms, 0),
      got = part.reduce((x, p) => x + p.tokens, 0),
      all = this.log.nBlocks - 1;
    const rows = [
      [num(fr.running), "running"],
      [num(fr.waiting), "waiting"],
      [all > 0 ? Math.round((100 * this.owners.size) / all) + "%" : "–", "KV blocks held"],
      [busy ? num((got / busy) * 1e3) : "–", "tokens a second"],
      [num(fr.total), "tokens so far"],
      [num(fr.hit), "prompt, cached"],
      [num(fr.preempted), "preemptions"],
    ];
    this.$(".tiles").innerHTML = rows.map(([v, k]) => `<div><b>${v}</b><span>${k}</span></div>`).join("");
  }
  say(f) {
    const all = words(this.log, f),
      most = 40,
      ul = this.$(".say"),
      p = this.pinned,
      pin = this.$(".pin");
    ul.replaceChildren(
      ...all.slice(0, most).map(([s, text]) => {
        const li = document.createElement("li"),
          i = document.createElement("i");
        if (s && s.colour) i.style.background = s.colour;
        else i.className = "none";
        if (li !== null && text !== all[0][1]) li.append(i);
        li.append(text);
        return li;
      }),
    );
    if (all.length > most) {
      const li = document.createElement("li");
      li.textContent = `and ${num(all.length - most)} more events`;
      ul.append(li);
    }
    this.hereNow(f);
    pin.hidden = !p;
    if (p) {
      const b = document.createElement("button");
      b.textContent = "Clear";
      b.type = "button";
      b.onclick = () => this.pin(null);
      const t = this.log.stateAt(f).tables.get(p.id) || [];
      const span = document.createElement("span");
      span.textContent = `Request ${p.id}: ${this.log.stateOf(p, f) || "not here yet"}, ${num(p.prompt)} prompt tokens, ${num(this.log.tokensAt(p, f))} new. ${t.length ? "Table: " + ranges(t) : "It holds no blocks."}`;
      pin.replaceChildren(span, b);
    }
  }
  hereNow(f) {
    // who is in the engine: a bar each, which also pins it
    const {log} = this,
      all = log.seqs.filter(s => s.from <= f && (s.to < 0 || s.to >= f)),
      most = 24,
      ul = this.$(".here"),
      focus = this.root.activeElement && this.root.activeElement.dataset.seq;
    all.sort((a, b) => (log.stateOf(a, f) === "queued") - (log.stateOf(b, f) === "queued") || a.index - b.index);
    this.$("h3").textContent = all.length
      ? `In the engine now${all.length > most ? `, the first ${most} of ${num(all.length)}` : ""}`
      : "Nobody is in the engine";
    ul.replaceChildren(
      ...all.slice(0, most).map(s => {
        const li = document.createElement("li"),
          b = document.createElement("button"),
          state = log.stateOf(s, f),
          n = log.tokensAt(s, f),
          want = Math.max(1, s.limit - s.prompt);
        b.type = "button";
        b.dataset.seq = s.index;
        b.setAttribute("aria-pressed", String(this.pinned === s));
        b.innerHTML = `<i></i><span></span><span class="done"><u></u></span><em></em>`;
        b.children[0].style.background = b.querySelector("u").style.background = s.colour;
        b.children[1].textContent = String(s.name || "Request " + s.id);
        b.querySelector("u").style.width = Math.min(100, (100 * n) / want) + "%";
        b.children[3].textContent = state === "decode" ? `${num(n)} of ${num(want)}` : state;
        b.onclick = () => this.pin(s);
        li.append(b);
        return li;
      }),
    );
    if (focus !== undefined && focus !== null) {
      const b = ul.querySelector(`[data-seq="${focus}"]`);
      if (b) b.focus();
    }
  }
  canvas(name, height) {
    const c = this.$("." + name),
      w = Math.max(60, c.clientWidth || c.parentNode.clientWidth - 26),
      dpr = Math.min(3, devicePixelRatio || 1);
    if (c.style.height !== height + "px") c.style.height = height + "px";
    if (c.width !== Math.round(w * dpr) || c.height !== Math.round(height * dpr)) {
      c.width = Math.round(w * dpr);
      c.height = Math.round(height * dpr);
    }
    const g = c.getContext("2d");
    g.setTransform(dpr, 0, 0, dpr, 0, 0);
    g.clearRect(0, 0, w, height);
    return [g, w, dpr];
  }
  kv(f, fr) {
    const {log, state} = this,
      top = Math.min(log.nBlocks - 1, Math.max(log.top, Math.min(log.nBlocks - 1, 63)));
    const w0 = Math.max(60, this.$(".kv").clientWidth),
      area = 300;
    let cell = 58;
    while (cell > 4 && Math.ceil(top / Math.floor(w0 / cell)) * cell > area) cell--;
    const lines = Math.ceil(top / Math.floor(w0 / cell)),
      per = Math.ceil(top / lines), // no line with a single block
      [g, w] = this.canvas("kv", Math.max(60, lines * cell + 2)),
      gap = cell > 10 ? 3 : cell > 5 ? 1 : 0,
      size = cell - gap,
      r = cell > 14 ? 4 : 0;
    this.grid = {per, cell, top};
    const fill = new Map(),
      fresh = new Set(),
      bs = log.size || 1;
    for (const [seq, t] of state.tables) {
      const n = state.read.get(seq) || 0;
      t.forEach((b, i) => fill.set(b, Math.max(fill.get(b) || 0, Math.max(0, Math.min(1, (n - i * bs) / bs)))));
    }
    for (let i = fr.from; i < fr.to; i++) {
      const e = log.events[i];
      if (e.event === "alloc" || e.event === "share") for (const b of e.blocks) fresh.add(b);
    }
    const rest = this.c("rest"),
      muted = this.c("strong"),
      text = this.c("text"),
      pin = this.pinned && this.pinned.id,
      colour = new Map();
    const hue = id => {
      let s = colour.get(id);
      if (!s) colour.set(id, (s = (this.recordOf(id) || {}).colour || "#888"));
      return s;
    };
    g.font = `600 ${Math.min(12, size * 0.42)}px ui-sans-serif, system-ui, sans-serif`;
    g.textAlign = "center";
    g.textBaseline = "middle";
    const shape = (x, y, s = size) => {
      g.beginPath();
      if (r) g.roundRect(x, y, s, s, r);
      else g.rect(x, y, s, s);
    };
    for (let b = 1; b <= top; b++) {
      const x = ((b - 1) % per) * cell + 1,
        y = Math.floor((b - 1) / per) * cell + 1,
        own = this.owners.get(b);
      g.globalAlpha = pin !== null && pin !== undefined && pin !== false && !(own && own.includes(pin)) ? 0.22 : 1;
      if (own) {
        const c = hue(pin !== null && own.includes(pin) ? pin : own[0]),
          full = fill.get(b) || 0;
        g.save();
        shape(x, y);
        g.fillStyle = rest;
        g.fill();
        g.clip();
        g.fillStyle = c;
        g.globalAlpha *= 0.34;
        g.fillRect(x, y, size, size);
        g.globalAlpha /= 0.34;
        if (full > 0) g.fillRect(x, y + size * (1 - full), size, size * full);
        if (own.length > 1) {
          g.strokeStyle = hue(own[1]);
          g.lineWidth = Math.max(1, size / 5);
          for (let k = -size; k < size; k += Math.max(3, size / 2.2)) {
            g.beginPath();
            g.moveTo(x + k, y + size);
            g.lineTo(x + k + size, y);
            g.stroke();
          }
        }
        g.restore();
        if (size >= 19) {
          const label = own.length > 1 ? "×" + own.length : String(own[0] % 1000);
          if (own.length > 1) {
            g.fillStyle = "#fffd";
            g.beginPath();
            g.roundRect(x + size / 2 - 10, y + size / 2 - 7, 20, 14, 4);
            g.fill();
          }
          g.fillStyle = full > 0.5 || own.length > 1 ? INK : text;
          g.fillText(label, x + size / 2, y + size / 2 + 1);
        }
      } else if (state.cached.has(b)) {
        g.strokeStyle = muted;
        g.lineWidth = size > 8 ? 1.6 : 1;
        shape(x + 0.8, y + 0.8, size - 1.6);
        g.stroke();
      } else if (state.drain.has(b)) {
        g.strokeStyle = muted;
        g.lineWidth = 1;
        g.setLineDash([2, 2]);
        shape(x + 0.5, y + 0.5, size - 1);
        g.stroke();
        g.setLineDash([]);
      } else {
        g.fillStyle = rest;
        shape(x, y);
        g.fill();
      }
      if (fresh.has(b) && own) {
        g.strokeStyle = text;
        g.lineWidth = size > 10 ? 2.2 : 1;
        shape(x, y);
        g.stroke();
      }
      g.globalAlpha = 1;
    }
    const all = log.nBlocks - 1,
      held = this.owners.size,
      shared = [...this.owners.values()].filter(o => o.length > 1).length,
      never = all - top;
    let slots = 0,
      used = 0;
    for (const b of this.owners.keys()) {
      slots++;
      used += fill.get(b) || 0;
    }
    const note = `${num(held)} of ${num(all)} held${shared ? `, ${num(shared)} shared` : ""}, ${num(state.cached.size)} cached${slots ? `; ${Math.round(100 * (1 - used / slots))}% of held slots empty` : ""}${never > 0 ? `; ${num(never)} never used` : ""}`;
    this.$(".kv-note").textContent = note;
    this.$(".kv").setAttribute("aria-label", "KV blocks: " + note);
  }
  view() {
    // frames [a, b) on the x axis
    const n = this.log.frames.length,
      span = +this.$(".span").value;
    if (!span || span >= n) return [0, n];
    const a = Math.max(0, Math.min(n - span, this.at - Math.floor(span / 2)));
    return [a, a + span];
  }
  layer(name, w, h, dpr, paint) {
    // what does not depend on the cursor is drawn once
    const [a, b] = this.view(),
      key = `${a},${b},${w},${h},${dpr},${this.log.changed}`,
      old = this.layers[name];
    if (old && old.key === key) return old.c;
    const c = document.createElement("canvas");
    c.width = Math.round(w * dpr);
    c.height = Math.round(h * dpr);
    const g = c.getContext("2d");
    g.scale(dpr, dpr);
    paint(g, a, b);
    this.layers[name] = {key, c};
    return c;
  }
  cursor(g, f, w, h) {
    const [a, b] = this.view(),
      x = ((f + 0.5 - a) / (b - a)) * w;
    g.strokeStyle = this.c("text");
    g.lineWidth = 1.5;
    g.beginPath();
    g.moveTo(x, 0);
    g.lineTo(x, h);
    g.stroke();
    g.fillStyle = this.c("text");
    g.beginPath();
    g.moveTo(x - 5, 0);
    g.lineTo(x + 5, 0);
    g.lineTo(x, 6);
    g.fill();
  }
  rate(f) {
    const h = 108,
      [g, w, dpr] = this.canvas("rate", h),
      {frames} = this.log;
    g.drawImage(
      this.layer("rate", w, h, dpr, (g, a, b) => {
        const cols = Math.max(1, Math.min(b - a, Math.floor(w / 2))),
          kvH = 16,
          H = h - kvH - 6,
          speed = [],
          batch = [],
          used = [],
          all = Math.max(1, this.log.nBlocks - 1);
        for (let k = 0; k < cols; k++) {
          const i0 = a + Math.floor((k * (b - a)) / cols),
            i1 = Math.max(i0 + 1, a + Math.floor(((k + 1) * (b - a)) / cols)),
            wide = Math.max(0, Math.round((b - a) / 150));
          let tok = 0,
            t = 0,
            bs = 0,
            u = 0;
          for (let i = Math.max(a, i0 - wide); i < Math.min(b, i1 + wide); i++) {
            tok += frames[i].tokens;
            t += frames[i].ms;
          }
          for (let i = i0; i < i1; i++) {
            bs = Math.max(bs, frames[i].batch);
            u += frames[i].used;
          }
          speed.push(t ? (tok / t) * 1e3 : 0);
          batch.push(bs);
          used.push(u / (i1 - i0) / all);
        }
        const sorted = [...speed].sort((x, y) => x - y),
          top = Math.max(1, sorted[Math.floor(sorted.length * 0.99)] * 1.12),
          most = Math.max(1, ...batch),
          x = k => (k / cols) * w;
        g.fillStyle = this.c("accent");
        g.globalAlpha = 0.22;
        g.beginPath();
        g.moveTo(0, H);
        speed.forEach((v, k) => {
          const y = H - Math.min(1, v / top) * (H - 8);
          g.lineTo(x(k), y);
          g.lineTo(x(k + 1), y);
        });
        g.lineTo(w, H);
        g.fill();
        g.globalAlpha = 1;
        g.strokeStyle = this.c("accent");
        g.lineWidth = 1.6;
        g.beginPath();
        speed.forEach((v, k) => {
          const y = H - Math.min(1, v / top) * (H - 8);
          if (!k) g.moveTo(0, y);
          g.lineTo(x(k), y);
          g.lineTo(x(k + 1), y);
        });
        g.stroke();
        g.strokeStyle = this.c("hot");
        g.lineWidth = 1.8;
        g.setLineDash([5, 3]);
        g.beginPath();
        batch.forEach((v, k) => {
          const y = H - (v / most) * (H - 8);
          if (!k) g.moveTo(0, y);
          g.lineTo(x(k), y);
          g.lineTo(x(k + 1), y);
        });
        g.stroke();
        g.setLineDash([]);
        g.fillStyle = this.c("rest");
        g.fillRect(0, h - kvH, w, kvH);
        g.fillStyle = this.c("strong");
        used.forEach((v, k) => g.fillRect(x(k), h - kvH * Math.min(1, v), Math.max(1, w / cols), kvH * Math.min(1, v)));
        this.scale = {top, most};
      }),
      0,
      0,
      w,
      h,
    );
    this.cursor(g, f, w, h);
    const note = `— tokens a second (to ${num(this.scale.top)})   ╌ rows a step (to ${this.scale.most})   ▇ share of KV blocks held`;
    this.$(".rate-note").textContent = note;
    this.$(".rate").setAttribute(
      "aria-label",
      `Throughput up to ${num(this.scale.top)} tokens a second, batch up to ${this.scale.most} rows`,
    );
  }
  req(f) {
    const {log} = this,
      n = Math.max(1, log.laneOpen.length),
      lane = Math.min(20, 340 / n),
      h = Math.ceil(Math.max(40, n * lane + 4)),
      [g, w, dpr] = this.canvas("req", h);
    this.lane = lane;
    g.drawImage(
      this.layer("req", w, h, dpr, (g, a, b) => {
        const x = i => ((i - a) / (b - a)) * w,
          hot = this.c("hot"),
          muted = this.c("strong"),
          text = this.c("text"),
          pad = lane > 6 ? 2 : 0,
          stripe = lane > 8;
        g.font = `600 ${Math.min(11, lane * 0.62)}px ui-sans-serif, system-ui, sans-serif`;
        g.textBaseline = "middle";
        for (const s of log.seqs) {
          const end = s.to < 0 ? log.frames.length : s.to + 1;
          if (end < a || s.from > b) continue;
          g.globalAlpha = this.pinned && this.pinned !== s ? 0.25 : 1;
          const y = s.lane * lane + 2,
            mid = y + lane / 2 - 1,
            hh = Math.max(1.2, lane - pad);
          s.runs.forEach(([at, st], k) => {
            const x0 = Math.max(-2, x(at)),
              x1 = Math.min(w + 2, Math.max(x0 + 1, x(k + 1 < s.runs.length ? s.runs[k + 1][0] : end)));
            if (x1 < 0 || x0 > w) return;
            if (st === "queued") {
              g.strokeStyle = muted;
              g.lineWidth = Math.min(1.5, lane / 2.5);
              g.beginPath();
              g.moveTo(x0, mid);
              g.lineTo(x1, mid);
              g.stroke();
            } else if (st === "preempted") {
              g.strokeStyle = hot;
              g.lineWidth = Math.min(2.5, lane / 2);
              g.setLineDash([4, 3]);
              g.beginPath();
              g.moveTo(x0, mid);
              g.lineTo(x1, mid);
              g.stroke();
              g.setLineDash([]);
            } else {
              g.fillStyle = s.colour;
              if (st === "prefill") {
                const al = g.globalAlpha;
                g.globalAlpha = al * 0.35;
                g.fillRect(x0, y, x1 - x0, hh);
                g.globalAlpha = al;
                if (stripe) {
                  g.save();
                  g.beginPath();
                  g.rect(x0, y, x1 - x0, hh);
                  g.clip();
                  g.strokeStyle = s.colour;
                  g.lineWidth = 1.5;
                  for (let q = x0 - hh; q < x1; q += 6) {
                    g.beginPath();
                    g.moveTo(q, y + hh);
                    g.lineTo(q + hh, y);
                    g.stroke();
                  }
                  g.restore();
                }
              } else {
                g.beginPath();
                if (lane > 8 && x1 - x0 > 6) g.roundRect(x0, y, x1 - x0 - 0.5, hh, 3);
                else g.rect(x0, y, x1 - x0, hh);
                g.fill();
              }
              if (lane >= 12 && st === "decode" && x1 - Math.max(0, x0) > 24) {
                g.fillStyle = INK;
                g.fillText(String(s.name || s.id).slice(0, 12), Math.max(0, x0) + 5, y + hh / 2 + 0.5);
              }
            }
          });
          if (s.to >= 0 && x(end) <= w + 1) {
            g.fillStyle = text;
            if (lane > 4) g.fillRect(x(end) - 1.5, y - 1, 1.8, hh + 1);
          }
        }
        g.globalAlpha = 1;
      }),
      0,
      0,
      w,
      h,
    );
    this.cursor(g, f, w, h);
    const done = log.seqs.filter(s => s.to >= 0 && s.to <= f).length,
      here = log.seqs.filter(s => s.from <= f).length,
      note = `${num(here)} of ${num(log.seqs.length)} have come, ${num(done)} ended`;
    this.$(".req-note").textContent = note;
    this.$(".req").setAttribute("aria-label", "Requests: " + note);
  }
  table(f) {
    const {log} = this,
      rows = log.seqs.filter(s => s.from <= f && (s.to < 0 || s.to >= f)).slice(0, 200),
      cell = t => `<td>${t}</td>`;
    this.$("table").innerHTML =
      `<caption>Requests that are here at step ${f + 1}: ${words(log, f)[0][1]}</caption><thead><tr>${["request", "state", "prompt tokens", "new tokens", "from cache", "preempted", "blocks"].map(x => `<th scope="col">${x}</th>`).join("")}</tr></thead><tbody>` +
      rows
        .map(
          s =>
            `<tr><th scope="row">${String(s.id)}</th>${[log.stateOf(s, f), num(s.prompt), num(log.tokensAt(s, f)), num(s.cached), s.preempts ? String(s.runs.filter(([at, st]) => st === "preempted" && at <= f).length) : "0"].map(cell).join("")}<td class="ids">${ranges(this.state.tables.get(s.id) || [], 40)}</td></tr>`,
        )
        .join("") +
      "</tbody>";
  }
  // --- pointing
  frameAt(c, e) {
    const [a, b] = this.view(),
      r = c.getBoundingClientRect();
    return Math.floor(a + ((e.clientX - r.left) / r.width) * (b - a));
  }
  laneAt(c, e) {
    const r = c.getBoundingClientRect(),
      lane = Math.floor((e.clientY - r.top - 2) / this.lane),
      f = this.frameAt(c, e);
    return this.log.seqs.find(s => s.lane === lane && s.from <= f && (s.to < 0 || s.to >= f)) || null;
  }
  laneWords(c, e) {
    const s = this.laneAt(c, e),
      f = this.frameAt(c, e);
    return (
      s &&
      `Request ${s.id}: ${this.log.stateOf(s, f)}, ${num(s.prompt)} prompt tokens, ${num(this.log.tokensAt(s, f))} new${s.preempts ? `, preempted ${s.preempts}×` : ""}`
    );
  }
  rateWords(c, e) {
    const f = this.frameAt(c, e),
      fr = this.log.frames[f];
    return fr && `Step ${num(f + 1)}: ${ms(fr.ms)}, ${many(fr.tokens, "token")}, ${many(fr.batch, "row")}, ${num(fr.used)} blocks held`;
  }
  blockAt(c, e) {
    if (!this.grid) return 0;
    const r = c.getBoundingClientRect(),
      {per, cell, top} = this.grid,
      col = Math.floor((e.clientX - r.left) / cell),
      b = Math.floor((e.clientY - r.top) / cell) * per + col + 1;
    return col < per && b >= 1 && b <= top ? b : 0;
  }
  blockWords(b) {
    if (!b) return "";
    const own = this.owners.get(b);
    if (!own)
      return `Block ${b}: ${this.state.cached.has(b) ? "cached, nobody holds it" : this.state.drain.has(b) ? "waits for a window to end" : "free"}`;
    const at = this.state.tables.get(own[0]).indexOf(b),
      bs = this.log.size;
    return `Block ${b}: positions ${num(at * bs)} to ${num((at + 1) * bs - 1)} of ${own
      .map(i => "request " + i)
      .slice(0, 5)
      .join(", ")}${own.length > 5 ? ` and ${own.length - 5} more` : ""}`;
  }
  hover(c, e, text) {
    if (this.tip) {
      this.tip.remove();
      this.tip = null;
    }
    if (!c || !text) return;
    const box = c.parentNode,
      r = box.getBoundingClientRect(),
      tip = (this.tip = document.createElement("div"));
    tip.className = "tip";
    tip.textContent = text;
    box.append(tip);
    tip.style.left = Math.max(4, Math.min(r.width - tip.offsetWidth - 6, e.clientX - r.left + 12)) + "px";
    tip.style.top = e.clientY - r.top + 16 + "px";
  }
  // --- a server that streams: lines of server-sent events, each a JSON array of events
  async stream(url) {
    const feed = this.$(".feed");
    let key = "",
      wait = 500;
    const door = this.$(".door");
    while (this.el.isConnected) {
      try {
        const r = await fetch(url, {headers: key ? {authorization: "Bearer " + key} : {}});
        if (r.status === 401) {
          key = await this.askKey(key ? "The server does not accept this key." : "");
          continue;
        }
        if (!r.ok) throw new Error(`the server answered ${r.status}`);
        door.hidden = true;
        feed.textContent = "live";
        wait = 500;
        this.log.clear();
        this.log.cursor = null;
        this.at = 0;
        const reader = r.body.pipeThrough(new TextDecoderStream()).getReader();
        let rest = "";
        for (;;) {
          const {value, done} = await reader.read();
          if (done) break;
          const parts = (rest + value).split("\n\n");
          rest = parts.pop();
          const got = parts.flatMap(p => (p.startsWith("data: ") ? JSON.parse(p.slice(6)) : []));
          if (got.length) this.append(got);
        }
        feed.textContent = "the stream ended; asking again";
      } catch (e) {
        feed.textContent = `not live: ${e.message}`;
      }
      await new Promise(ok => setTimeout(ok, (wait = Math.min(8000, wait * 2))));
    }
  }
  askKey(why) {
    const door = this.$(".door"),
      input = door.querySelector("input"),
      told = door.querySelector(".why");
    door.hidden = false;
    told.textContent = why;
    this.$(".feed").textContent = "waits for a key";
    input.select();
    return new Promise(ok => {
      door.onsubmit = e => {
        e.preventDefault();
        told.textContent = "";
        ok(input.value);
      };
    });
  }
}

// --- hosts -----------------------------------------------------------------------------------------------------------------------------
export async function open(el, {text, gz, url, theme} = {}) {
  // a page: the log as text, as base64 of gzip, or from a server
  const d = new Dashboard(el, {theme});
  try {
    if (gz)
      text = await new Response(
        new Blob([Uint8Array.from(atob(gz), c => c.charCodeAt(0))]).stream().pipeThrough(new DecompressionStream("gzip")),
      ).text();
    if (text) d.load(Log.parse(text));
    if (url) d.stream(url);
  } catch (e) {
    d.fail(e.message);
  }
  return d;
}
export default {
  // anywidget
  render({model, el}) {
    const d = new Dashboard(el);
    let have = 0; // events so far: a message tells where it begins, the trait has all from the beginning
    const take = (lines, from) => {
      const got = from > have ? [] : Log.parse(lines).slice(have - from);
      have += got.length;
      if (got.length) d.append(got);
    };
    const all = () => take(model.get("lines") || "", 0),
      more = m => take(m.lines, m.from);
    model.on("change:lines", all);
    model.on("msg:custom", more);
    all();
    return () => {
      model.off("change:lines", all);
      model.off("msg:custom", more);
      d.play(false);
      d.watch.disconnect();
    };
  },
};
