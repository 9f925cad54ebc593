"use strict";
// Draws the events of `batchers/events`, one per second. The page is drawn anew from each event, and
// only what differs is changed in the document: the focus and a selection stay.

const SVG = "http://www.w3.org/2000/svg";
const STALE_SECONDS = 3;
const RECONNECT_SECONDS = 6;
const $ = (id) => document.getElementById(id);

// --- Elements ---

// Make an element: h("td.n", {title: "..."}, "text", child, null, [children]).
function h(name, attributes, ...children) {
  const [tag, ...classes] = name.split(".");
  const isSvg = ["svg", "path", "rect", "line", "title"].includes(tag);
  const node = isSvg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  if (classes.length) node.setAttribute("class", classes.join(" "));
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children.flat(9).filter((one) => one !== null && one !== undefined && one !== ""));
  return node;
}

// Make `old` equal to `wanted`, and keep its nodes where they are of the same kind.
function update(old, wanted) {
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== wanted.data) old.data = wanted.data;
    return;
  }
  for (const { name } of [...old.attributes]) if (!wanted.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of wanted.attributes) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  updateChildren(old, [...wanted.childNodes]);
}

function updateChildren(parent, wanted) {
  wanted.forEach((next, index) => {
    const before = parent.childNodes[index];
    if (!before) parent.append(next);
    else if (before.nodeName !== next.nodeName) before.replaceWith(next);
    else update(before, next);
  });
  while (parent.childNodes.length > wanted.length) parent.lastChild.remove();
}

// --- Figures as text ---

const NONE = "–";
// Another server process has the events of a shared batcher.
const UNKNOWN = "not known here";
const rounded = (value) => value.toLocaleString("en", { maximumSignificantDigits: 3 });
const whole = (value) => Math.round(value).toLocaleString("en");

// A few failures among many requests are neither 0 % nor leave 100 %.
function percent(value) {
  if (value === null) return NONE;
  if (value > 0 && value < 0.01) return "< 1 %";
  return value > 0.99 && value < 1 ? "> 99 %" : `${Math.round(100 * value)} %`;
}

const plural = (count, noun) => `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;

// With so many digits at least: in a column three, on an axis one.
function duration(seconds, digits = 3) {
  const shown = (value) => value.toLocaleString("en", { minimumSignificantDigits: digits, maximumSignificantDigits: 3 });
  if (seconds === null) return NONE;
  if (seconds < 0.000002) return "< 2 µs";
  if (seconds < 0.001) return `${shown(1e6 * seconds)} µs`;
  return seconds < 1 ? `${shown(1000 * seconds)} ms` : `${shown(seconds)} s`;
}

function age(seconds) {
  if (seconds === null) return NONE;
  if (seconds < 120) return `${Math.floor(seconds)} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.floor(seconds / 3600)} h` : `${Math.floor(seconds / 86400)} d`;
}

function bytes(count) {
  if (count === null) return NONE;
  return count < 2 ** 30 ? `${whole(count / 2 ** 20)} MiB` : `${rounded(count / 2 ** 30)} GiB`;
}

// --- Tables and drawings ---

// A table; a column is [title, class]. On a phone each row is a block of named cells.
function table(columns, rows, { isNarrow = false } = {}) {
  const cell = (content, index) => {
    const [title, kind] = columns[index];
    const name = `${index ? "td" : "th"}${kind ? `.${kind}` : ""}`;
    return h(name, index ? { "data-name": title } : { "data-name": title, scope: "row" }, content);
  };
  return h(isNarrow ? "table" : "table.rows", null,
    h("thead", null, h("tr", null, columns.map(([title, kind]) => h(kind ? `th.${kind}` : "th", { scope: "col" }, title)))),
    h("tbody", null, rows.map((row) => h("tr", null, row.map(cell)))));
}

function bar(share) {
  return h("svg.bar", { viewBox: "0 0 100 1", preserveAspectRatio: "none", "aria-hidden": "true" },
    h("rect.track", { width: 100, height: 1 }), h("rect", { width: (100 * share).toFixed(1), height: 1 }));
}

// A round number that is not below the value.
function ceiling(value) {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return unit * [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((one) => one * unit >= value * 0.9999);
}

// Axes around a drawing of 100 by 100, whose upper edge is `top`.
function plot(label, top, format, ends, ...drawing) {
  return h("div.plot", null,
    h("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img", "aria-label": label },
      h("line.mid", { x1: 0, x2: 100, y1: 0, y2: 0 }), h("line.mid", { x1: 0, x2: 100, y1: 50, y2: 50 }), drawing),
    h("div.scale", { "aria-hidden": "true" }, [top, top / 2, 0].map((one) => h("span", null, one ? format(one) : "0"))),
    h("div.ends", { "aria-hidden": "true" }, ends.map((one) => h("span", null, one))));
}

// The path of a line; it is interrupted where there are no values.
function trace(values, top) {
  const step = 100 / (values.length - 1);
  return values.map((value, index) => {
    if (value === null) return "";
    const point = `${(index * step).toFixed(2)} ${(100 - (100 * Math.min(value, top)) / top).toFixed(2)}`;
    const isFirst = index === 0 || values[index - 1] === null;
    return isFirst ? `M${point}L${point}` : `L${point}`;
  }).join("");
}

const key = (kind, text) => h("span", null,
  h("svg", { viewBox: "0 0 20 8", "aria-hidden": "true" }, h(`path.${kind}`, { d: "M1 4L19 4" })), text);

// --- Parts of the page ---

const worst = (problems) => (problems.length ? problems[0].level : "");
const anchor = (index) => `batcher-${index}`;

function verdict(batchers) {
  const all = batchers.flatMap((one, index) => one.problems.map((problem) => ({ ...problem, name: one.name, index })));
  all.sort((a, b) => (a.level > b.level) - (a.level < b.level)); // "critical" < "warning"
  const critical = all.filter((one) => one.level === "critical").length;
  let text = "All is well: every batcher is ready";
  if (critical) text = `${plural(critical, "critical problem")}`;
  if (all.length > critical) text = (critical ? `${text}, ` : "") + plural(all.length - critical, "warning");
  document.title = all.length ? `(${all.length}) ${critical ? "Critical" : "Warning"} – Batchers` : "Batchers";
  return h(`div.verdict${all.length ? `.${worst(all)}` : ""}`, null,
    h("h2", { "aria-live": "polite" }, text),
    all.length ? h("ul.problems", null, all.map((one) => h(`li.${one.level}`, null,
      h("span.level", null, one.level === "critical" ? "Critical" : "Warning"),
      h("a", { href: `#${anchor(one.index)}` }, one.name),
      h("span", null, h("strong", null, one.text), one.detail ? ` – ${one.detail}` : "")))) : null);
}

function summary(batchers) {
  const columns = [["Batcher", ""], ["Problems", ""], ["State", ""], ["Workers", "n"], ["Requests/s", "n"], ["Waiting", "n"],
    ["In flight", "n"], ["p50", "n"], ["p99", "n"], ["Load", "n"]];
  return h("div.card", null, table(columns, batchers.map((one, index) => [
    h("a", { href: `#${anchor(index)}` }, one.name),
    h(worst(one.problems) ? `span.${worst(one.problems)}-text` : "span.soft", null, problemsOf(one)),
    stateOf(one),
    `${one.workers_ready} of ${one.num_workers}`,
    rounded(one.requests_per_second), whole(one.waiting), whole(one.running),
    duration(one.latency.total.p50), duration(one.latency.total.p99),
    one.streams ? `${whole(one.streams.live)} of ${whole(one.streams.places)} places` : percent(one.explanation.load),
  ])));
}

function problemsOf(batcher) {
  const critical = batcher.problems.filter((one) => one.level === "critical").length;
  if (critical) return `${critical} critical`;
  return batcher.problems.length ? plural(batcher.problems.length, "warning") : "none";
}

const stateOf = (batcher) => (batcher.state !== "open" ? batcher.state : batcher.is_ready ? "ready" : "not ready");

function figures(one) {
  const figure = (name, value, more, level) => h(level ? `div.${level}` : "div", null,
    h("dt", null, name), h("dd", null, value, more ? h("small", null, more) : ""));
  const fill = one.waiting / one.max_queue_size;
  const missing = one.workers_ready < one.num_workers;
  const { streams } = one;
  const sizes = Object.entries(one.batch_sizes);
  const batches = sizes.reduce((sum, [, count]) => sum + count, 0);
  const mean = batches ? sizes.reduce((sum, [size, count]) => sum + size * count, 0) / batches : null;
  return h("dl.figures", null,
    figure(streams ? "Streams/s" : "Requests/s", rounded(one.requests_per_second), one.rejected_per_second ? `${rounded(one.rejected_per_second)}/s rejected` : "", one.rejected_per_second ? "warning" : ""),
    figure("Workers ready", whole(one.workers_ready), `of ${one.num_workers}`, missing ? (one.workers_ready ? "warning" : "critical") : ""),
    figure("Waiting", whole(one.waiting), `of ${whole(one.max_queue_size)}`, fill >= 1 ? "critical" : fill >= 0.8 ? "warning" : ""),
    streams ? [
      figure("Live streams", whole(streams.live), `of ${whole(streams.places)} places`, one.waiting && streams.live >= streams.places ? "warning" : ""),
      figure("First chunk p50", duration(streams.first_chunk.p50)),
      figure("First chunk p95", duration(streams.first_chunk.p95)),
      figure("Chunk gap p95", duration(streams.chunk_gap.p95)),
      figure("Chunks/s", streams.chunks_per_second === null ? NONE : rounded(streams.chunks_per_second)),
    ] : [
      figure("In flight", whole(one.running)),
      figure("Latency p50", ...latencyOf(one, "p50")),
      figure("Latency p99", ...latencyOf(one, "p99")),
      figure("Batch size", mean === null ? NONE : rounded(mean), `of ${one.max_batch_size}`),
      figure("Load", percent(one.explanation.load)),
    ]);
}

// A latency, and the text below it.
function latencyOf(one, share) {
  const value = one.latency.total[share];
  return value === null && !one.is_reporter ? [NONE, UNKNOWN] : [duration(value), ""];
}

const AGES = ["5 min ago", "now"];

function latency(one) {
  const { total } = one.timeline;
  const line = (share) => total.map((point) => point[share]);
  const top = ceiling(Math.max(...line("p99")));
  const isEmpty = total.every((point) => point.p99 === null);
  const row = (name, values) => [name, duration(values.p50), duration(values.p95), duration(values.p99 ?? null)];
  const { streams } = one;
  return h("div.card.half", null,
    h("h3", null, streams ? "Time of streams" : "Latency"),
    isEmpty ? h("p.empty", null, one.is_reporter ? `No ${streams ? "stream has ended" : "request was answered"}.` : `Latencies are ${UNKNOWN}.`) : plot(`Latency over five minutes; p99 now ${duration(one.latency.total.p99)}`, top, (value) => duration(value, 1), AGES,
      ["p99", "p95", "p50"].map((share) => h(`path.${share}`, { d: trace(line(share), top) }))),
    isEmpty ? null : h("p.key", null, key("p50", "p50"), key("p95", "p95"), key("p99", "p99"), streams ? "from arrival to end" : "from arrival to answer"),
    table([["", ""], ["p50", "n"], ["p95", "n"], ["p99", "n"]], [
      ...(streams ? [row("First chunk", streams.first_chunk), row("Between chunks", streams.chunk_gap)] : []),
      row(streams ? "Wait for a place" : "Queue", one.latency.queue_wait),
      row(streams ? "In its place" : "Model", one.latency.infer), row("Total", one.latency.total),
    ], { isNarrow: true }));
}

const OUTCOMES = { completed: "answered", failed: "failed", refused: "refused by the model", expired: "expired", cancelled: "cancelled by the caller", rejected: "rejected" };

function traffic(one) {
  // The slot that goes on is not full yet.
  const rates = one.timeline.requests_per_second.slice(0, -1);
  const first = rates.findIndex((rate) => rate !== null);
  const edge = (100 * Math.max(first, 0)) / (rates.length - 1);
  const top = ceiling(Math.max(...rates));
  const ended = one.ends.reduce((sum, end) => sum + end.count, 0);
  const noun = one.streams ? "streams" : "requests";
  const title = `Answered ${noun} per second`;
  return h("div.card.half", null,
    h("h3", null, title),
    plot(`${title} over five minutes; now ${rounded(one.requests_per_second)}`, top, rounded, AGES,
      h("path.area", { d: first < 0 ? "" : `M${edge} 100${trace(rates, top).replace("M", "L")}L100 100Z` }), h("path", { d: trace(rates, top) })),
    h("h3.next", null, "How they ended"),
    one.ends.length ? table([["Outcome", ""], [one.streams ? "Streams" : "Requests", "n"], ["Share", "n"]], one.ends.map((end) => [
      h(["failed", "expired", "rejected"].includes(end.outcome) ? "span.warning-text" : "span", null,
        OUTCOMES[end.outcome] + (end.reason ? `: ${end.reason}` : end.outcome === "failed" ? ": error of the model" : "")),
      whole(end.count), percent(end.count / ended),
    ]), { isNarrow: true }) : h("p.empty", null, `No ${noun} have ended.`));
}

const RELEASES = { full: "full", idle: "a worker was free", hold: "held, then not worth waiting", window: "max_delay had passed",
  deadline: "a request would be late", drain: "draining", retry: "tried again" };

function sizes(one) {
  const counts = Object.entries(one.batch_sizes).map(([size, count]) => [Number(size), count]);
  if (!counts.length) return h("div.card", null, h("h3", null, "Batch sizes"), h("p.empty", null, "No batch was answered."));
  const largest = Math.max(one.max_batch_size, counts.at(-1)[0]);
  const width = Math.ceil(largest / 32);
  const bins = new Array(Math.ceil(largest / width)).fill(0);
  for (const [size, count] of counts) bins[Math.ceil(size / width) - 1] += count;
  const most = Math.max(...bins);
  const top = ceiling(Math.max(most, 2));
  const step = 100 / bins.length;
  const name = (index) => (width === 1 ? `${index + 1}` : `${index * width + 1} to ${(index + 1) * width}`);
  return h("div.card", null,
    h("h3", null, "Batch sizes"),
    plot(`Batches by size; most have ${name(bins.indexOf(most))} requests`, top, whole, ["1", whole(largest)],
      bins.map((count, index) => h("rect", { x: (index * step + step * 0.1).toFixed(2), width: (step * 0.8).toFixed(2),
        y: (100 - (100 * count) / top).toFixed(2), height: ((100 * count) / top).toFixed(2) },
      h("title", null, `Batches of ${name(index)}: ${whole(count)}`)))));
}

function releases(one) {
  const counts = Object.entries(one.releases);
  const batches = counts.reduce((sum, [, count]) => sum + count, 0);
  return h("div.card", null,
    h("h3", null, "Why batches left"),
    counts.length ? table([["Reason", ""], ["", "share"], ["Batches", "n"]], counts.map(([reason, count]) => [
      RELEASES[reason] || reason, bar(count / batches), whole(count)]), { isNarrow: true })
      : h("p.empty", null, "No batch was answered."));
}

function learned(one) {
  const [title, size, each] = one.streams ? ["Time of a step", "Streams", "Per chunk"] : ["Learned time of a batch", "Size", "Per request"];
  return h("div.card", null,
    h("h3", null, title),
    one.learned.length ? table([[size, "n"], ["Median", "n"], ["p95", "n"], [each, "n"]], one.learned.map((point) => [
      rounded(point.size), duration(point.median), duration(point.p95), duration(point.median / point.size)]), { isNarrow: true })
      : h("p.empty", null, "Nothing was learned yet."));
}

function settings(one) {
  return h("div.card.wide", null,
    h("h3", null, "Settings"),
    one.settings.length ? table([["Option", ""], ["Value", "long"], ["From", "long"]], one.settings.map((option) => [
      option.name, option.value, option.source])) : h("p.empty", null, "Every option has its default."));
}

const WORKER_STATES = { loading: "loading", ready: "ready", lost: "lost", retired: "closed" };

function workers(one) {
  const hasGpus = one.workers.some((worker) => worker.gpu_bytes);
  const columns = [["Worker", ""], ["State", ""], ["For", "n"], ["Process", "n"], [one.streams ? "Streams" : "Batches", "n"], ["Memory", "n"], ...(hasGpus ? [["GPU memory", "n"]] : []), ["Replaced", "n"], ["Last end", "long"]];
  return h("div.card.wide", null, h("h3", null, "Workers"), table(columns, one.workers.map((worker) => [
    `${worker.index}`,
    h(worker.state === "lost" ? "span.critical-text" : worker.state === "loading" ? "span.warning-text" : "span", null,
      WORKER_STATES[worker.state] || (["new", "opening"].includes(one.state) ? "not started" : UNKNOWN)),
    age(worker.age), worker.pid === null ? NONE : worker.node ? `${worker.pid} on ${worker.node}` : `${worker.pid}`, ...[worker.batches, bytes(worker.memory_bytes), ...(hasGpus ? [bytes(worker.gpu_bytes)] : []), worker.exits].map((value) =>
      worker.state === "unknown" ? NONE : typeof value === "number" ? whole(value) : value),
    worker.exit_text ? `${worker.exit_text}, ${age(worker.exit_age)} ago` : NONE,
  ])));
}

function batcher(one, index) {
  const level = worst(one.problems);
  return h("section.batcher", { id: anchor(index), "aria-labelledby": `${anchor(index)}-name` },
    h("div.title", null, h("h2", { id: `${anchor(index)}-name` }, one.name),
      h(level ? `span.badge.${level}` : "span.badge", null, level ? `${stateOf(one)}, ${problemsOf(one)}` : stateOf(one)),
      h("span.soft", null, `${whole(one.totals.completed)} answered, ${whole(one.totals.failed + one.totals.expired + one.totals.rejected)} not, since the start`)),
    one.is_reporter ? null : h("p.soft", null, "Another server process reports for this batcher: the counts here are those of all server processes, and further figures are not known here."),
    figures(one),
    h("p.explanation", null, one.explanation.text),
    h("div.grid", null, traffic(one), latency(one), one.streams ? null : [sizes(one), releases(one)], learned(one), workers(one), settings(one)));
}

function errors(data) {
  const counts = Object.entries(data.error_counts).map(([code, count]) => `${code} ${whole(count)}`).join(", ");
  const columns = [["Status", ""], ["Code", ""], ["Type", ""], ["Route", "long"], ["Answers", "n"], ["Last", "n"], ["Last error id", "long"]];
  return h("section.batcher", { "aria-labelledby": "errors" },
    h("div.title", null, h("h2", { id: "errors" }, "Error answers"), h("span.soft", null, counts ? `since the start: ${counts}` : "")),
    h("div.card", null, data.errors.length ? table(columns, data.errors.map((one) => [
      `${one.status}`, one.code, one.type, h("code", null, one.route), whole(one.count), age(one.age), h("code", null, one.error_id)]))
      : h("p.empty", null, "None. The latest answers of the exception handlers appear here, with the ids that lead to the log.")));
}

function draw(data) {
  $("process").textContent = `Process ${data.pid}, last 5 minutes`;
  updateChildren($("content"), [
    verdict(data.batchers),
    ...(data.batchers.length > 1 ? [summary(data.batchers)] : []),
    ...data.batchers.map(batcher),
    errors(data),
  ]);
}

// --- Connection ---

let source = null;
let arrivedAt = performance.now();
let triedAt = 0;
let isPaused = false;

function connect() {
  triedAt = performance.now();
  if (source) source.close();
  source = new EventSource("batchers/events");
  source.onmessage = (event) => {
    arrivedAt = performance.now();
    if (!isPaused) draw(JSON.parse(event.data));
    showLink();
  };
}

function showLink() {
  const seconds = (performance.now() - arrivedAt) / 1000;
  const isStale = seconds > STALE_SECONDS;
  document.body.classList.toggle("stale", isStale);
  document.body.classList.toggle("paused", isPaused && !isStale);
  const text = isStale ? `No answer for ${Math.floor(seconds)} s: figures are old` : isPaused ? "Paused" : "Live";
  if ($("link").textContent !== text) $("link").textContent = text;
  if (isStale && !document.title.startsWith("No answer")) document.title = "No answer – Batchers";
}

$("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  $("pause").textContent = isPaused ? "Go on" : "Pause";
  $("pause").setAttribute("aria-pressed", `${isPaused}`);
  showLink();
});
// The browser connects again by itself when a stream ends, but not after an answer of an error; and it
// does not see that a server is stuck.
setInterval(() => {
  showLink();
  const now = performance.now();
  if (Math.min(now - arrivedAt, now - triedAt) > 1000 * RECONNECT_SECONDS) connect();
}, 500);
connect();
