// Joins the events of the server to the page.

import { $, copy, gpuFacts, hostFacts, lead, showAdvice, showChips, showNotes, showProcesses, showRuns, showTrouble } from "./parts.js";
import { Plot } from "./plot.js";
import { Series } from "./series.js";
import { at, bytes, degrees, lasting, percent, say, watts } from "./words.js";

const SPANS = [300, 900, 3600];
const SILENCE = 45; // seconds without even a heartbeat after which the connection is taken for dead

const series = new Series();
const plots = new Set();
const cards = new Map(); // index of a GPU: its card
let every = 1;
let newest = null; // the latest sample
let sample = null; // the one that is shown: an older one while the page is paused
let to = 0; // the right end of the plots
let chosen = null; // the span that the person chose
let mark = null; // the time that the person points at
let paused = false;
let connected = false;
let heard = performance.now(); // when the server last said anything
let sampled = heard; // when it last had a sample
let source = null;
let style = {};

// What is plotted, of a GPU and of the host.

const ofGpu = [
  { field: "utilisation", label: "Utilisation", colour: "utilisation", words: percent, top: () => 100 },
  { field: "memory_used", label: "Memory", colour: "memory", words: bytes, top: (gpu) => gpu.memory_total },
  { field: "power", label: "Power", colour: "power", words: watts, top: (gpu) => gpu.power_limit },
  { field: "temperature", label: "Temperature", colour: "temperature", words: degrees, top: () => 100 },
];
const ofHost = [
  { field: "cpu", label: "CPU", colour: "utilisation", words: percent, top: () => 100 },
  { field: "memory_used", label: "Memory", colour: "memory", words: bytes, top: (host) => host.memory_total },
];

// A plot with its caption; `update` is given the record that the number is a field of.
function addPlot(parent, prefix, title, { field, label, colour, words, top }) {
  const figure = copy("a-plot");
  const [canvas, value, detail] = [figure.querySelector("canvas"), figure.querySelector(".value"), figure.querySelector(".detail")];
  let record = {};
  say(figure.querySelector(".label"), label);
  parent.append(figure);
  const scale = (highest) => top(record) || niceAbove(highest);
  const plot = new Plot(canvas, series, { name: `${prefix}.${field}`, colour, most: scale, words });
  plots.add(plot);
  watch(plot, canvas);
  return {
    update(latest) {
      record = latest;
      const marked = mark === null ? -1 : series.nearest(mark);
      say(value, words(marked < 0 ? record[field] : series.column(plot.name)[marked]));
      say(detail, marked < 0 ? ofWhole(record[field], top(record), words) : at(series.times[marked]));
      canvas.setAttribute("aria-label", `${title}: ${label} ${words(record[field])} now, ${range(plot.name, words)}`);
    },
    remove() {
      plots.delete(plot);
      seeing.unobserve(canvas);
      sizing.unobserve(canvas);
      figure.remove();
    },
  };
}

// The part of a whole, where the whole says more than "of 100%".
function ofWhole(some, whole, words) {
  if (!whole || whole === 100) return "";
  const part = typeof some === "number" ? ` · ${percent((100 * some) / whole)}` : "";
  return `of ${words(whole)}${part}`;
}

function niceAbove(highest) {
  if (!(highest > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(highest));
  return [1, 2, 5, 10].map((step) => step * unit).find((step) => step >= highest);
}

function range(name, words) {
  let [low, high] = [Infinity, -Infinity];
  for (const number of series.column(name)) {
    if (number === null) continue;
    low = Math.min(low, number);
    high = Math.max(high, number);
  }
  return low > high ? "no history yet" : `from ${words(low)} to ${words(high)} in the last hour`;
}

// What is out of sight is not drawn, and what comes into sight is.
const bySight = new WeakMap();
const seeing = new IntersectionObserver((entries) => {
  for (const entry of entries) bySight.get(entry.target).seen = entry.isIntersecting;
  drawSoon();
}, { rootMargin: "200px" });
const sizing = new ResizeObserver(() => drawSoon());

function watch(plot, canvas) {
  bySight.set(canvas, plot);
  seeing.observe(canvas);
  sizing.observe(canvas);
  const point = (event) => {
    const box = canvas.getBoundingClientRect();
    mark = to - span() + span() * Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    showSoon();
  };
  const leave = () => {
    mark = null;
    showSoon();
  };
  canvas.addEventListener("pointermove", point);
  canvas.addEventListener("pointerdown", point);
  canvas.addEventListener("pointerleave", leave);
  canvas.addEventListener("pointercancel", leave);
}

// Drawing: at most once for each frame of the screen, and not at all while nobody looks.

let asked = { draw: false, show: false };

function soon(what) {
  if (!asked.draw && !asked.show) requestAnimationFrame(frame);
  asked[what] = true;
}
const drawSoon = () => soon("draw");
const showSoon = () => soon("show");

function frame() {
  const { show: whole } = asked;
  asked = { draw: false, show: false };
  if (whole && sample !== null) show();
  for (const plot of plots) plot.draw({ from: to - span(), to, mark, style });
}

// The span that was chosen, or the smallest that holds all there is.
function span() {
  if (chosen !== null) return chosen;
  const age = series.times.length ? to - series.times[0] : 0;
  return SPANS.find((seconds) => age <= seconds) ?? SPANS.at(-1);
}

function readStyle() {
  const css = getComputedStyle(document.documentElement);
  const names = ["line", "faint", "utilisation", "memory", "power", "temperature"];
  style = Object.fromEntries(names.map((name) => [name, css.getPropertyValue(`--${name}`).trim()]));
  style.font = getComputedStyle(document.body).fontFamily;
  drawSoon();
}

// The parts of the page.

let hostPlots = null;

function show() {
  const { reading, advice, trouble } = sample;
  showTrouble(trouble);
  document.querySelector(`.spans input[value="${span()}"]`).checked = true;
  if (reading === null) return;
  const { host, gpus } = reading;
  say($("host"), host.name ?? "This machine");
  document.title = `${host.name ?? "hotloop"} · hotloop top`;
  say($("lead"), lead(reading));
  showAdvice(advice);
  showGpus(gpus);
  hostPlots ??= ofHost.map((row) => addPlot($("computer-plots"), "host", "Host", row));
  for (const plot of hostPlots) plot.update(host);
  say($("computer-facts"), hostFacts(host));
  showRuns(reading);
  showProcesses(reading);
  showNotes(reading);
  say($("rate"), `One sample every ${every === 1 ? "second" : `${every} s`}, the last at ${at(reading.time)}.`);
}

function showGpus(gpus) {
  for (const [index, card] of cards) {
    if (gpus.some((gpu) => gpu.index === index)) continue;
    card.plots.forEach((plot) => plot.remove());
    card.section.remove();
    cards.delete(index);
  }
  for (const gpu of gpus) {
    if (!cards.has(gpu.index)) cards.set(gpu.index, addCard(gpu));
    showGpu(cards.get(gpu.index), gpu);
  }
}

function addCard(gpu) {
  const section = copy("a-gpu");
  const after = [...cards].filter(([index]) => index > gpu.index).sort(([one], [other]) => one - other)[0];
  $("gpus").insertBefore(section, after ? after[1].section : null);
  section.setAttribute("aria-label", `GPU ${gpu.index}`);
  const parent = section.querySelector(".plots");
  return { section, plots: ofGpu.map((row) => addPlot(parent, `gpu${gpu.index}`, `GPU ${gpu.index}`, row)) };
}

function showGpu({ section, plots: own }, gpu) {
  const part = (name) => section.querySelector(name);
  say(part(".index"), `GPU ${gpu.index}`);
  say(part(".name"), gpu.name);
  say(part(".facts"), gpuFacts(gpu));
  part(".trouble").hidden = gpu.error === null;
  say(part(".trouble"), gpu.error ?? "");
  showChips(part(".chips"), gpu.throttled ?? []);
  for (const plot of own) plot.update(gpu);
}

// The connection.

function connect() {
  source?.close();
  source = new EventSource("/events");
  heard = performance.now();
  const on = (kind, act) =>
    source.addEventListener(kind, (event) => {
      heard = performance.now();
      connected = true;
      act(JSON.parse(event.data));
      showState();
    });
  on("history", (history) => {
    every = history.every;
    series.load(history);
  });
  on("sample", (latest) => take(latest));
  on("beat", () => {});
  source.addEventListener("error", () => {
    connected = false;
    showState();
    // A server that refuses (or is not the same any more) ends an EventSource for good.
    if (source.readyState === EventSource.CLOSED) setTimeout(connect, 5000);
  });
}

function take(latest) {
  if (latest.trouble === null && latest.reading !== null) {
    sampled = performance.now();
    series.add(latest.reading.time, numbers(latest.reading));
  }
  newest = latest;
  if (!paused) display(latest);
}

function display(latest) {
  sample = latest;
  to = latest.reading?.time ?? to;
  showSoon();
}

function numbers({ host, gpus }) {
  const found = new Map(ofHost.map(({ field }) => [`host.${field}`, host[field]]));
  for (const gpu of gpus) {
    for (const { field } of ofGpu) found.set(`gpu${gpu.index}.${field}`, gpu[field]);
  }
  return found;
}

function showState() {
  const silent = (performance.now() - sampled) / 1000;
  const [state, words] = !connected
    ? ["lost", newest === null ? "Connecting" : "Connection lost, trying again"]
    : paused
      ? ["paused", "Paused"]
      : silent > Math.max(5, 3 * every)
        ? ["lost", `No sample for ${lasting(silent)}`]
        : ["live", "Live"];
  $("state").dataset.state = newest === null && !connected ? "waiting" : state;
  say($("state-words"), words);
}

function look() {
  if (performance.now() - heard > 1000 * Math.max(SILENCE, 3 * every)) connect(); // as after a laptop slept
  showState();
}

$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").dataset.paused = String(paused);
  say($("pause"), paused ? "Go on" : "Pause");
  if (!paused && newest !== null) display(newest);
  showState();
});
for (const input of document.querySelectorAll(".spans input")) {
  input.addEventListener("change", () => {
    chosen = Number(input.value);
    showSoon();
  });
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", readStyle);
readStyle();
connect();
setInterval(look, 1000);
