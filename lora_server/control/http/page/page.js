// Writes what /status.json says, and then what /status.events sends: when something happens, and every two seconds.
// Rates are differences between two answers.
"use strict";

const SOON_MS = 200, AGAIN_MS = 2000, GIVE_UP_MS = 8000;
const at = (id) => document.getElementById(id);
const WAITS = {
  name: "the server's answer", place: "a place", weights: "the adapter's weights", engine: "the engine's next pass",
};
let before = null;

function element(tag, text = "", kind = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function size(bytes) {
  let value = bytes, unit = "B";
  for (const larger of ["KiB", "MiB", "GiB", "TiB"]) {
    if (value < 999.5) break;
    value /= 1024;
    unit = larger;
  }
  return unit === "B" || value >= 99.95 ? `${value.toFixed(0)} ${unit}` : `${value.toFixed(1)} ${unit}`;
}

const count = (number) => Math.round(number).toLocaleString("en");
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const rate = (number) => number >= 10 ? count(number) : number.toFixed(1);

function duration(seconds) {
  return seconds >= 1 ? `${seconds.toFixed(1)} s` : seconds >= 1e-3 ? `${(seconds * 1e3).toFixed(1)} ms`
    : `${(seconds * 1e6).toFixed(0)} µs`;
}

// -- the parts of the page

function totals(now) {
  const stats = now.shards.map((shard) => shard.stats);
  const sum = (field) => stats.reduce((total, one) => total + (one?.[field] ?? 0), 0);
  const rows = {
    "adapters": count(now.adapters),
    "in use": count(now.active),
    "waiting for a place": count(now.queued),
    "waiting for weights": count(now.num_loading),
    "engines": count(now.clients),
    "device pools": `${size(sum("weight_bytes"))} of ${size(sum("total_bytes"))}`,
    "host pools": sum("host_total_bytes") ? `${size(sum("host_bytes"))} of ${size(sum("host_total_bytes"))}` : "none",
    "hit rate": now.hits + now.misses ? percent(now.hits / (now.hits + now.misses)) : "-",
    "refused": count(now.refused.length),
  };
  at("totals").replaceChildren(...Object.entries(rows).map(([name, value]) => {
    const pair = element("div");
    pair.append(element("dt", name), element("dd", value));
    return pair;
  }));
}

function line(name, value) {
  const made = element("p");
  made.append(element("span", name), element("span", value));
  return made;
}

function meter(label, ...shares) {
  const made = element("div", "", "meter");
  made.setAttribute("role", "img");
  made.setAttribute("aria-label", label);
  made.append(...shares.map((share) => {
    const part = element("i");
    part.style.width = `${Math.max(0, Math.min(100, 100 * share))}%`;
    return part;
  }));
  return made;
}

function work(shard, past, seconds) {
  const now = shard.stats, then = past?.pid === shard.pid ? past.stats : null;
  if (!then || seconds <= 0 || now.steps < then.steps) return [line("steps", count(now.steps))];
  const steps = now.steps - then.steps;
  const found = [line("steps", `${count(now.steps)}, ${rate(steps / seconds)} /s`)];
  if (steps) {
    const each = (field) => (now[field] - then[field]) / steps / 1e9;
    const [wait, compute] = [each("wait_ns"), each("compute_ns")];
    const text = `${duration(compute)} + ${duration(wait)}`;
    found.push(line("compute + wait", text));
    if (wait + compute > 0) {
      found.push(meter(`a step: ${text}`, compute / (wait + compute), wait / (wait + compute)));
    }
  }
  return found;
}

// whole adapters, by the tier that they came from; without one that nothing came from
function loads(stats) {
  return (stats.load_times ?? []).map((one) => [one, one.counts.reduce((sum, times) => sum + Number(times), 0)])
    .filter(([, times]) => times)
    .map(([one, times]) => line(`loads from ${one.phase}`, `${count(times)}, each ${duration(one.sum_ns / times / 1e9)}`));
}

function card(shard, past, seconds) {
  const made = element("article", "", "shard"), title = element("h3");
  title.append(element("span", shard.replica ? `shard ${shard.shard}, replica ${shard.replica}` : `shard ${shard.shard}`));
  const since = shard.lost_since ? ` since ${new Date(1e3 * shard.lost_since).toLocaleTimeString()}` : "";
  title.append(element("span", shard.state + since, shard.state === "up" ? "state up" : "state down"));
  made.append(title);
  if (since) made.append(line("it was on", `node ${shard.node}`));
  if (!shard.stats?.device) return made;
  const used = shard.stats.weight_bytes, total = shard.stats.total_bytes;
  made.append(line(shard.stats.device, `node ${shard.node}, pid ${shard.pid}`));
  made.append(line("weights", `${size(used)} of ${size(total)}`), meter("weights", used / Math.max(1, total)));
  made.append(...work(shard, past, seconds), ...loads(shard.stats));
  if (shard.stats.failed) made.append(line("failed steps", count(shard.stats.failed)));
  if (shard.restarts) made.append(line("restarts", count(shard.restarts)));
  return made;
}

function shards(now, seconds) {
  const stages = new Map();
  for (const shard of now.shards) {
    const past = before?.shards.find((one) => one.shard === shard.shard);
    if (!stages.has(shard.stage)) stages.set(shard.stage, element("div", "", "stage"));
    stages.get(shard.stage).append(card(shard, past, seconds));
  }
  for (const [stage, row] of stages) row.setAttribute("aria-label", `stage ${stage}`);
  at("shards").replaceChildren(...stages.values());
}

// columns: heading -> kind of its cells; rows: of texts
function table(id, columns, rows, empty) {
  const head = element("tr");
  head.append(...Object.entries(columns).map(([name, kind]) => element("th", name, kind)));
  const body = rows.map((cells) => {
    const row = element("tr");
    row.append(...cells.map((cell, i) => element("td", cell, Object.values(columns)[i])));
    return row;
  });
  if (!rows.length) {
    const none = element("td", empty, "text");
    none.colSpan = Object.keys(columns).length;
    const row = element("tr");
    row.append(none);
    body.push(row);
  }
  at(id).replaceChildren(head, ...body);
}

function adapters(now) {
  const rows = now.hottest.map((one) => [
    one.name, one.pinned ? `${one.state}, pinned` : one.state, `${one.resident_layers} of ${one.layers}`,
    size(one.bytes), String(one.lora_rank), count(one.holders), count(one.holds),
    one.holds ? duration(one.hold_seconds / one.holds) : "-",
  ]);
  const columns = {
    adapter: "", state: "text", "layers ready": "", bytes: "", rank: "", "held by": "", "held before": "", "each for": "",
  };
  table("adapters", columns, rows, "none yet: lora-server adapters add NAME DIR");
  at("shown").textContent = rows.length < now.adapters ? `the ${rows.length} hottest of ${count(now.adapters)}` : "";
}

function loading(rows) {
  at("loads").hidden = !rows.length;
  const left = (one) => one.expected_us ? duration(one.expected_us / 1e6) : "unknown";
  table("loading", { adapter: "", "requests": "", "loaded in": "" },
    rows.map((one) => [one.name, count(one.requests), left(one)]), "");
}

// kinds of waits, each with a histogram of all requests since the controller started
function waits(rows) {
  const each = rows.map((one) => [one, one.counts.reduce((sum, times) => sum + times, 0)]).filter(([, times]) => times);
  at("waits").hidden = !each.length;
  table("waited", { "waited for": "", requests: "", "each for": "" },
    each.map(([one, times]) => [WAITS[one.phase], count(times), duration(one.sum_ns / times / 1e9)]), "");
}

// rows of texts and numbers, all with the same names
function tenants(rows) {
  at("tenants").hidden = !rows.length;
  const columns = Object.fromEntries(Object.keys(rows[0] ?? {}).map((name) => [name, ""]));
  const shown = (value) => typeof value === "number" ? count(value) : value;
  table("by-tenant", columns, rows.map((one) => Object.values(one).map(shown)), "");
}

function write(now) {
  document.title = `${now.ready ? "●" : "○"} lora-server ${now.model}`;
  at("model").textContent = now.model;
  at("layout").textContent = now.replicas > 1 ? `${now.layout}, ${now.replicas} replicas` : now.layout;
  const to = now.resize && now.resize.state ? now.resize : null;
  const resized = to ? `, resizing to ${to.layout}: ${to.state}, ${to.done} of ${to.total}` : "";
  const served = (now.degraded ? `ready, degraded: ${now.degraded}` : "ready") + resized;
  at("ready").textContent = now.ready ? served : `not ready: ${now.reason}`;
  at("ready").className = now.ready && !now.degraded ? "state up" : "state down";
  const seconds = before ? (now.seconds - before.seconds) : 0;
  totals(now);
  shards(now, seconds);
  adapters(now);
  loading(now.loading);
  waits(now.waits);
  const engines = now.joined.map((one) => [
    one.instance, String(one.client), one.transports.join(", ") || "-", `${one.silent_seconds.toFixed(0)} s ago`,
    count(one.held),
  ]);
  table("clients", { engine: "", client: "", by: "text", heard: "", "adapters held": "" }, engines, "none has joined");
  tenants(now.tenants);
  at("refusals").hidden = !now.refused.length;
  table("refused", { adapter: "", why: "text long" }, now.refused.map((one) => [one.name, one.reason]), "");
  before = now;
}

// -- the loop

function show(text) {
  write(JSON.parse(text));
  at("alarm").hidden = true;
  at("asked").textContent = `as of ${new Date().toLocaleTimeString()}`;
}

// the server ends a stream after some seconds; what is wrong, if something is, this says when it asks again
async function follow() {
  try {
    const answer = await fetch("/status.json", { signal: AbortSignal.timeout(GIVE_UP_MS), cache: "no-store" });
    if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
    show(await answer.text());
    const stream = new EventSource("/status.events");
    stream.onmessage = (event) => show(event.data);
    stream.onerror = () => {
      stream.close();
      setTimeout(follow, SOON_MS);
    };
  } catch (error) {
    at("alarm").textContent = `The server does not answer (${error.message}). What is below is what it said last.`;
    at("alarm").hidden = false;
    setTimeout(follow, AGAIN_MS);
  }
}

follow();
