// The status page: one stream of state, and the past and the pool fetched beside it.
import { age, bytes, count, percent, seconds } from "./format.js";
import { PoolMap, TimeChart, colour, kindColour, ramp, spark, strip } from "./charts.js";

const $ = (id) => document.getElementById(id);
const PALETTE = ["#0f8f83", "#5c60d6", "#d08a2e", "#b0487f", "#3f8fc4", "#7a9a3a", "#9a6bc9", "#c4604a"];
const HISTORY_MS = 5000, POOL_MS = 2000;

let state = null; // the newest state
let selected = ""; // id of the session that pool and step log show
let scope = ""; // "" for all sessions, or the id of the one that the charts show
let history = null;
let stream = null;

// ---------------------------------------------------------------- small helpers

function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name in made && name !== "list") made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

const tip = {
  show(event, text) {
    const box = $("tip");
    box.hidden = false;
    box.textContent = text;
    const right = event.clientX + 16 + box.offsetWidth > window.innerWidth;
    box.style.left = `${right ? event.clientX - box.offsetWidth - 12 : event.clientX + 16}px`;
    box.style.top = `${Math.min(event.clientY + 14, window.innerHeight - box.offsetHeight - 8)}px`;
  },
  hide() {
    $("tip").hidden = true;
  },
};

// Text with `code` in it.
const withCode = (text) => text.split("`").map((part, index) => (index % 2 ? element("code", {}, part) : part));

const label = (session) => `${session.stage} #${session.replica}`;
const find = (id) => state?.sessions.find((session) => session.id === id);
const total = (pick) => state.sessions.reduce((sum, session) => sum + (pick(session) ?? 0), 0);

// ---------------------------------------------------------------- charts and maps

const ratioChart = new TimeChart($("chart-ratio"), tip, { format: (value) => percent(value), top: 1 });
const tokenChart = new TimeChart($("chart-tokens"), tip, { format: (value) => count(value) });
const pool = new PoolMap($("pool"), tip, (map, cell) => {
  const first = cell * map.blocks_a_cell;
  const last = Math.min(first + map.blocks_a_cell, map.num_blocks) - 1;
  const parts = [`present ${map.present[cell]} %`];
  if (map.absent[cell]) parts.push(`absent ${map.absent[cell]} %`);
  if (map.pending[cell]) parts.push(`pending ${map.pending[cell]} %`);
  const written = map.age_s[cell] == null ? "never written" : `last written ${age(map.age_s[cell])} ago`;
  return `${first === last ? `block ${first}` : `blocks ${first} to ${last}`}\n${parts.join(", ")}\n${written}`;
});

function redraw() {
  ratioChart.draw();
  tokenChart.draw();
  pool.draw();
  ramp($("ramp"));
  if (state) render();
}

// ---------------------------------------------------------------- rendering

function tile(id, value, sub, tone = "") {
  const box = $(id);
  const [, number, unit] = /^(\S+) ?(.*)$/.exec(value);
  const big = box.querySelector("[data-v]");
  big.className = `big ${tone}`;
  big.replaceChildren(number, unit ? element("small", {}, unit) : "");
  setText(box.querySelector("[data-s]"), sub);
}

function renderTiles() {
  const daemon = state.daemon;
  const hits = total((s) => s.rates.hit_tokens), prefill = total((s) => s.rates.prefill_tokens);
  const minute = ratioNow();
  const queried = total((s) => s.queried_tokens), hit = total((s) => s.hit_tokens);
  tile("tile-hits", percent(minute), queried ? `${percent(hit / queried)} since attach` : "no request yet");
  tile("tile-tokens", `${count(hits)}${hits < 1e4 ? " " : ""}/s`, `${count(prefill)}/s prefilled · ${count(hit)} in all`);
  const steps = total((s) => s.rates.steps);
  const waiting = total((s) => s.waiting);
  tile("tile-steps", `${count(steps)} /s`, `${count(total((s) => s.steps))} in all · ${count(waiting)} records wait`);
  const cost = costNow();
  tile("tile-cost", cost ? seconds(cost.sum) : "–", cost ? `begin ${seconds(cost.begin)} · save ${seconds(cost.save)} · materialize ${seconds(cost.materialize)}` : "no step in the last minute");
  const share = daemon.budget_bytes ? daemon.used_bytes / daemon.budget_bytes : 0;
  tile("tile-memory", percent(share), `${bytes(daemon.used_bytes)} of ${bytes(daemon.budget_bytes)}`);
  const meter = $("tile-memory").querySelector(".meter i");
  meter.style.width = `${Math.min(100, Math.max(share * 100, share ? 1 : 0))}%`;
  meter.className = share > 0.95 ? "bad" : share > 0.85 ? "warn" : "";
  const recent = state.errors.filter((entry) => state.now - entry.at < 300);
  const failed = state.sessions.filter((s) => !s.live).length;
  const bad = recent.reduce((sum, entry) => sum + entry.count, 0);
  tile("tile-trouble", bad ? String(bad) : "none", failed ? `${failed} session failed` : bad ? "see below what to do" : "all sessions work", bad || failed ? "bad" : "good");
  if (history) {
    spark($("tile-hits").querySelector("canvas"), history.hit_ratio, "hit");
    spark($("tile-tokens").querySelector("canvas"), history.hit_tokens, "hit");
    spark($("tile-steps").querySelector("canvas"), history.steps, "time");
    spark($("tile-cost").querySelector("canvas"), history.step_us, "time");
  }
}

function ratioNow() {
  if (!history) return null;
  const last = history.hit_tokens.slice(-12), rest = history.prefill_tokens.slice(-12);
  const hits = last.reduce((a, b) => a + b, 0), all = hits + rest.reduce((a, b) => a + b, 0);
  return all ? hits / all : null;
}

function costNow() {
  const busy = state.sessions.filter((s) => s.step_s && s.rates.steps > 0);
  const steps = busy.reduce((sum, s) => sum + s.rates.steps, 0);
  if (!steps) return null;
  const mean = (phase) => busy.reduce((sum, s) => sum + s.step_s[phase] * s.rates.steps, 0) / steps;
  const [begin, save, materialize] = ["begin", "save", "materialize"].map(mean);
  return { begin, save, materialize, sum: begin + save + materialize };
}

function stateOf(session) {
  if (!session.live) return ["off", "failed", session.failure];
  if (session.away) return ["off", "away", "The worker takes the daemon for gone."];
  if (!session.steps) return ["idle", "attached", "No step yet."];
  if (session.idle_s > 5) return ["idle", `idle ${age(session.idle_s)}`, `Last step ${age(session.idle_s)} ago.`];
  return ["on", session.adopted ? "working, adopted" : "working", session.adopted ? "Taken over from an earlier daemon." : ""];
}

function renderSessions() {
  const body = $("sessions").tBodies[0];
  const known = new Map([...body.rows].map((row) => [row.dataset.id, row]));
  for (const session of state.sessions) {
    let row = known.get(session.id);
    known.delete(session.id);
    if (!row) {
      const select = () => choose(session.id);
      row = element("tr", { tabIndex: 0, onclick: select, onkeydown: (event) => event.key === "Enter" && select() });
      row.dataset.id = session.id;
      row.append(...Array.from({ length: 9 }, (_, index) => element("td", { className: [0, 1, 3].includes(index) ? "" : "n" })));
      row.cells[0].append(element("span", { className: "name" }), element("div", { className: "dim" }));
      row.cells[1].append(element("span", { className: "state" }, element("i", { className: "dot" }), element("span")));
      row.cells[3].append(element("div", { className: "ratio" }, element("span", { className: "track" }, element("i")), element("b")));
    }
    body.append(row);
    row.setAttribute("aria-selected", String(session.id === selected));
    setText(row.cells[0].firstChild, label(session));
    setText(row.cells[0].lastChild, `${session.model} · pid ${session.pid}${session.rank ? ` · rank ${session.rank}` : ""}`);
    const [dot, text, why] = stateOf(session);
    row.cells[1].title = why;
    row.querySelector(".dot").className = `dot ${dot}`;
    setText(row.querySelector(".state span"), text);
    setText(row.cells[2], count(session.rates.steps));
    row.querySelector(".track i").style.width = `${100 * (session.hit_ratio_1m ?? 0)}%`;
    setText(row.querySelector(".ratio b"), percent(session.hit_ratio_1m));
    setText(row.cells[4], `${count(session.rates.hit_tokens)} tok/s`);
    const spent = session.step_s;
    setText(row.cells[5], spent ? seconds(spent.begin + spent.save + spent.materialize) : "–");
    setText(row.cells[6], `${seconds(session.lag_s.p50)} · ${seconds(session.lag_s.p99)}`);
    setText(row.cells[7], count(session.waiting));
    row.cells[7].className = session.oldest_s > 1 ? "n bad" : "n";
    setText(row.cells[8], bytes(session.memory_bytes));
  }
  for (const row of known.values()) row.remove();
  $("sessions").hidden = !state.sessions.length;
  $("no-sessions").hidden = state.sessions.length > 0;
  setText($("socket-hint"), state.daemon.socket);
  const stages = new Set(state.sessions.map((session) => session.stage)).size;
  setText($("sessions-sum"), state.sessions.length ? `${state.sessions.length} worker${state.sessions.length > 1 ? "s" : ""} of ${stages} stage${stages > 1 ? "s" : ""}` : "");
}

function renderShared() {
  const shared = state.shared;
  $("shared").hidden = !shared?.namespaces.length;
  if ($("shared").hidden) return;
  setText($("shared-sum"), `${bytes(shared.used_bytes)} of ${bytes(shared.limit_bytes)}`);
  $("shared").querySelector("tbody").replaceChildren(...shared.namespaces.map((one) => {
    const name = element("td", {}, element("span", { className: "name" }, one.stage), element("div", { className: "dim mono" }, one.id));
    const cells = [
      count(one.sessions), `${count(one.blocks - one.free)} of ${count(one.blocks)}`, count(one.held), count(one.leases),
      one.asked ? percent(one.hit_ratio) : "–", count(one.stored), count(one.filled), count(one.evicted), `${age(one.oldest_s)} ago`,
    ];
    return element("tr", {}, name, ...cells.map((text) => element("td", { className: "n" }, text)));
  }));
}

function renderScope() {
  const wanted = [["", "all sessions"], ...(selected ? [[selected, label(find(selected))]] : [])];
  const sign = JSON.stringify([wanted, scope]);
  if ($("scope").dataset.sign === sign) return;
  $("scope").dataset.sign = sign;
  $("scope").replaceChildren(
    ...wanted.map(([id, name]) =>
      element("button", { type: "button", "aria-pressed": String(scope === id), onclick: () => { scope = id; renderScope(); fetchHistory(); } }, name)),
  );
}

const rowsOf = (key) => `${key.dtype}${key.shape.length ? ` × ${key.shape.join(" × ")}` : ""}`;

function renderMemory() {
  const daemon = state.daemon;
  const keys = new Map();
  let rest = 0;
  for (const session of state.sessions) {
    rest += session.memory.arena + session.memory.control;
    for (const key of session.keys) {
      const entry = keys.get(key.name) ?? { size: 0, locked: true, rows: rowsOf(key) };
      entry.size += key.pool_bytes + key.staging_bytes + 8 * session.slots;
      entry.locked &&= key.locked;
      if (entry.rows !== rowsOf(key)) entry.rows = `${key.dtype}, of several widths`;
      keys.set(key.name, entry);
    }
    rest += 8 * session.slots;
  }
  const parts = [...keys].sort((a, b) => b[1].size - a[1].size).map(([name, entry], index) => ({ name, ...entry, fill: PALETTE[index % PALETTE.length] }));
  if (rest) parts.push({ name: "arenas, logs and slot words", size: rest, locked: true, fill: colour("computed") });
  const whole = Math.max(daemon.budget_bytes, 1);
  $("memory-bar").replaceChildren(...parts.map((part) => {
    const bar = element("i", { title: `${part.name}: ${bytes(part.size)}` });
    bar.style.width = `${(100 * part.size) / Math.max(daemon.used_bytes, 1)}%`;
    bar.style.background = part.fill;
    return bar;
  }));
  $("memory-list").replaceChildren(...parts.map((part) => {
    const dot = element("i");
    dot.style.background = part.fill;
    const notes = [part.rows, `${percent(part.size / whole, 1)} of the budget`, part.locked ? null : "not locked"].filter(Boolean);
    return element("li", {}, dot, element("b", { title: part.name }, part.name), element("span", {}, bytes(part.size)),
      element("p", { className: "dim" }, notes.join(" · ")));
  }));
  setText($("memory-sum"), `${bytes(daemon.used_bytes)} of ${bytes(daemon.budget_bytes)}`);
  const facts = [
    ["/dev/shm free", `${bytes(daemon.shm_free_bytes)} of ${bytes(daemon.shm_size_bytes)}`],
    ["daemon's own memory", bytes(daemon.resident.anonymous + daemon.resident.file)],
    ["held by merged tensors", bytes(total((s) => s.arena.leased))],
    ["scheduler-side shims", String(daemon.schedulers)],
  ];
  const list = (pairs) => pairs.flatMap(([name, value, tone]) => [element("dt", {}, name), element("dd", { className: tone ?? "" }, value)]);
  $("memory-facts").replaceChildren(...list(facts));
  const waited = (what) => seconds(total((s) => s.trouble.wait_s[what]));
  const lost = total((s) => s.trouble.lost_steps), unknown = total((s) => s.trouble.unknown_rows);
  $("work-facts").replaceChildren(...list([
    ["engine waited for pages", waited("page")],
    ["merges waited for hits", waited("hit")],
    ["waited for room in the log", waited("log")],
    ["requests that hit", count(total((s) => s.hit_requests))],
    ["steps lost", count(lost), lost ? "warn" : ""],
    ["rows of hits not there", count(unknown), unknown ? "bad" : ""],
  ]));
}

function renderSelected() {
  const session = find(selected);
  setText($("pool-of"), session ? `of ${label(session)}` : "");
  setText($("steps-of"), session ? `of ${label(session)}` : "");
  const picker = $("pool-key");
  const names = session ? session.keys.map((key) => [String(key.id), key.name]) : [];
  if (picker.dataset.sign !== JSON.stringify(names)) {
    const had = picker.value;
    picker.dataset.sign = JSON.stringify(names);
    picker.replaceChildren(...names.map(([id, name]) => element("option", { value: id }, name)));
    if (names.some(([id]) => id === had)) picker.value = had;
    fetchPool();
  }
  const key = session?.keys.find((one) => String(one.id) === picker.value);
  if (key) {
    const [present, absent, pending] = key.presence;
    setText($("pool-sum"), `${count(present)} of ${count(session.slots)} slots present, ${count(absent)} absent, ${count(pending)} pending. `
      + `${rowsOf(key)}, ${bytes(key.row_bytes)} a row. ${count(key.rows_in)} rows in, ${count(key.rows_out)} out.`);
  } else setText($("pool-sum"), session ? "This session has no key yet." : "Choose a session.");
  const timeline = state.timeline ?? [];
  const spanMs = Math.min(10000, Math.max(1000, ...timeline.map((record) => record[4])));
  strip($("strip"), timeline, spanMs);
  setText($("strip-from"), `${(spanMs / 1000).toFixed(0)} s ago`);
  $("no-steps").hidden = timeline.length > 0;
  $("waterfall").hidden = !timeline.length;
  renderWaterfall(timeline.slice(-11).reverse());
}

function renderWaterfall(records) {
  const longest = Math.max(...records.map((record) => record[4] - record[6]), 0.001);
  $("waterfall").tBodies[0].replaceChildren(...records.map(([kind, sequence, rows, gathers, published, begun, done, gather]) => {
    const part = (milliseconds, fill) => {
      const bar = element("i");
      bar.style.width = `${(100 * Math.max(milliseconds, 0)) / longest}%`;
      bar.style.background = fill;
      return bar;
    };
    const what = [`record ${sequence}`, `waited ${seconds((published - begun) / 1e3)}`, `worked on ${seconds((begun - done) / 1e3)}`];
    if (gather) what.push(`of that gathers ${seconds(gather / 1e3)}`);
    return element("tr", { title: what.join("\n") },
      element("td", {}, element("span", { className: "mono" }, kind.toUpperCase()), element("span", { className: "dim" }, ` ${sequence}`)),
      element("td", { className: "n" }, gathers && !rows ? `${gathers} gather${gathers > 1 ? "s" : ""}` : count(rows)),
      element("td", {}, element("div", { className: "lane" }, part(published - begun, colour("wait")), part(begun - done - gather, kindColour(kind)), part(gather, colour("gather")))),
      element("td", { className: "n" }, seconds((published - done) / 1e3)));
  }));
}

function renderErrors() {
  $("no-errors").hidden = state.errors.length > 0;
  $("errors").replaceChildren(...state.errors.slice(0, 12).map((entry) =>
    element("li", { className: entry.level },
      element("span", { className: "what" }, entry.what, entry.where ? ` · ${entry.where}` : "", entry.count > 1 ? ` · ${count(entry.count)} times` : ""),
      element("span", { className: "when", title: new Date(entry.at * 1000).toLocaleString() }, `${age(state.now - entry.at)} ago`),
      entry.text ? element("p", { className: "dim" }, entry.text) : null,
      entry.cure ? element("p", { className: "cure" }, ...withCode(entry.cure)) : null)));
}

function render() {
  const daemon = state.daemon;
  setText($("version"), daemon.version);
  setText($("where"), `${daemon.socket} · pid ${daemon.pid} · up ${age(daemon.uptime_s)}`);
  document.title = `${percent(ratioNow())} hits · stagecached`;
  if (!find(selected)) {
    const best = [...state.sessions].sort((a, b) => b.steps - a.steps)[0];
    if (best) return choose(best.id);
    selected = "";
  }
  if (scope && !find(scope)) scope = "";
  renderTiles();
  renderSessions();
  renderShared();
  renderScope();
  renderMemory();
  renderSelected();
  renderErrors();
  document.body.dataset.ready = "yes";
}

// ---------------------------------------------------------------- data

function choose(id) {
  if (scope) scope = id;
  selected = id;
  connect();
  render();
  fetchHistory();
  fetchPool();
}

async function fetchJson(path) {
  try {
    const answer = await fetch(path);
    return answer.ok ? await answer.json() : null;
  } catch {
    return null;
  }
}

async function fetchHistory() {
  const wanted = scope;
  const found = await fetchJson(`/api/history${wanted ? `?session=${wanted}` : ""}`);
  if (!found || wanted !== scope) return;
  history = found;
  ratioChart.show(found.t, [{ values: found.hit_ratio, name: "hit", label: "hit ratio" }]);
  tokenChart.show(found.t, [
    { values: found.hit_tokens, name: "hit", label: "from the cache, a second" },
    { values: found.prefill_tokens, name: "computed", label: "prefilled, a second" },
  ]);
}

async function fetchPool() {
  const key = $("pool-key").value;
  if (!selected || key === "") return pool.show(null);
  const wanted = selected;
  const found = await fetchJson(`/api/pool?session=${wanted}&key=${key}`);
  if (wanted !== selected || !found) return;
  pool.show(found);
  setText($("oldest"), `${age(pool.oldest)} ago`);
}

function connect() {
  stream?.close();
  stream = new EventSource(`/events${selected ? `?session=${selected}` : ""}`);
  stream.onmessage = (event) => {
    state = JSON.parse(event.data);
    linked(true);
    render();
  };
  stream.onerror = () => linked(false);
}

function linked(yes) {
  document.body.classList.toggle("stale", !yes && state != null);
  $("link").querySelector(".dot").className = `dot ${yes ? "on" : "off"}`;
  setText($("link-text"), yes ? "live" : "daemon does not answer");
}

// ---------------------------------------------------------------- theme

const THEMES = ["auto", "light", "dark"];

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  setText($("theme"), `theme: ${theme}`);
  redraw();
}

let theme = "auto";
try {
  theme = THEMES.includes(localStorage.theme) ? localStorage.theme : "auto";
} catch { /* no storage: as the system says */ }
$("theme").addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  try { localStorage.theme = theme; } catch { /* for this page only */ }
  setTheme(theme);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
window.addEventListener("resize", redraw);
$("pool-key").addEventListener("change", () => { fetchPool(); renderSelected(); });

setTheme(theme);
connect();
fetchHistory();
setInterval(fetchHistory, HISTORY_MS);
setInterval(fetchPool, POOL_MS);
