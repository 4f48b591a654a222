// The parts of the page that are words: advice, processes, facts in a line.

import {
  UNKNOWN, bytes, count, lasting, milliseconds, percent, plural, rate, say, sayList, sayWithCode, sentence,
} from "./words.js";

const ROWS = 200; // processes that are shown, and ranks of a run
const SILENT = 10; // seconds after which it is told how old a rank's word is

export const $ = (id) => document.getElementById(id);
export const copy = (id) => $(id).content.firstElementChild.cloneNode(true);

export function lead({ gpus, host, driver }) {
  const names = new Map();
  for (const gpu of gpus) names.set(gpu.name, (names.get(gpu.name) ?? 0) + 1);
  const parts = [...names].map(([name, number]) => (number > 1 ? `${number} × ${name}` : name));
  if (!gpus.length) parts.push("no GPU");
  if (host.cores) parts.push(plural(host.cores, "core"));
  if (driver) parts.push(`driver ${driver}`);
  return parts.join(" · ");
}

export function hostFacts(host) {
  return [
    `swap ${bytes(host.swap_used)}`,
    `disk ${rate(host.disk_read)} read, ${rate(host.disk_written)} written`,
    `network ${rate(host.net_received)} in, ${rate(host.net_sent)} out`,
  ].join(" · ");
}

export function gpuFacts(gpu) {
  if (gpu.error !== null) return "";
  const facts = [`clock ${count(gpu.clock)} of ${count(gpu.clock_most, " MHz")}`];
  if (gpu.fan !== null) facts.push(`fan ${percent(gpu.fan)}`);
  facts.push(`PCIe ${rate(gpu.received)} in, ${rate(gpu.sent)} out`);
  if (gpu.ecc_uncorrected !== null || gpu.ecc_corrected !== null) {
    facts.push(`memory errors ${count(gpu.ecc_corrected)} corrected, ${count(gpu.ecc_uncorrected)} not`);
  }
  return facts.join(" · ");
}

export function showTrouble(trouble) {
  $("trouble").hidden = !trouble;
  say($("trouble"), trouble ? `The hardware could not be read just now: ${trouble}` : "");
}

// With a GPU, what could not be read is a note; without one, it is the reason.
export function showNotes({ gpus, notes }) {
  $("none").hidden = gpus.length > 0;
  sayList($("reasons"), notes.length ? notes : ["No GPU was found. `hotloop device` says why."]);
  $("notes").hidden = gpus.length === 0 || notes.length === 0;
  sayList($("note-list"), notes);
}

export function showChips(chips, reasons) {
  while (chips.children.length > reasons.length) chips.lastElementChild.remove();
  while (chips.children.length < reasons.length) chips.append(document.createElement("span"));
  reasons.forEach((reason, i) => say(chips.children[i], `slowed by ${reason}`));
}

export function showAdvice(advice) {
  const list = $("pieces");
  $("advice").hidden = advice.length === 0;
  while (list.children.length > advice.length) list.lastElementChild.remove();
  while (list.children.length < advice.length) list.append(copy("a-piece"));
  advice.forEach((piece, i) => {
    const item = list.children[i];
    item.dataset.rule = piece.rule;
    sayWithCode(item.querySelector(".words"), sentence(piece.words));
    sayWithCode(item.querySelector(".fix"), sentence(piece.fix ?? ""));
    say(item.querySelector(".rule"), piece.rule);
  });
}

// A table for each run on several ranks, and a row for each rank.
export function showRuns({ runs, time }) {
  const parent = $("runs");
  const shown = runs ?? [];
  while (parent.children.length > shown.length) parent.lastElementChild.remove();
  while (parent.children.length < shown.length) parent.append(copy("a-run"));
  shown.forEach((run, i) => showRun(parent.children[i], run, time));
}

function showRun(section, run, time) {
  const part = (name) => section.querySelector(name);
  const rates = run.by_rank.map((rank) => rank.items_per_second).filter((number) => number !== null);
  say(part("h2"), `${plural(run.ranks, "rank")} of ${run.program || "a program"}`);
  const missing = run.ranks - Math.min(run.by_rank.length, ROWS);
  const facts = rates.length === run.ranks ? [`${count(rates.reduce((one, other) => one + other, 0))} items/s`] : [];
  if (missing > 0) facts.push(`${plural(missing, "rank")} not shown`);
  say(part(".facts"), facts.join(" · "));
  say(part(".straggler"), waitedFor(run));
  part(".straggler").hidden = part(".straggler").textContent === "";
  const body = part("tbody");
  const ranks = run.by_rank.slice(0, ROWS);
  while (body.children.length > ranks.length) body.lastElementChild.remove();
  while (body.children.length < ranks.length) body.append(copy("a-rank"));
  ranks.forEach((rank, i) => showRank(body.children[i], rank, rank.rank === run.straggler, time));
}

function showRank(row, rank, slow, time) {
  const [number, device, , step, host, items, waiting] = row.cells;
  row.classList.toggle("slow", slow);
  say(number, String(rank.rank));
  say(device, rank.device);
  const silent = time - rank.time;
  say(row.querySelector(".line"), silent > SILENT ? `Silent for ${lasting(silent)}` : rank.line);
  say(step, count(rank.step));
  say(host, rank.host);
  say(items, count(rank.items_per_second));
  say(waiting, percent(rank.waiting));
}

// For whom the others wait; nothing where all are as fast.
function waitedFor({ by_rank: ranks, straggler }) {
  const slow = ranks.find((rank) => rank.rank === straggler);
  const others = ranks.filter((rank) => rank !== slow && rank.own !== null).map((rank) => rank.own);
  if (straggler === null || slow === undefined || others.length === 0) return "";
  const middle = others.sort((one, other) => one - other)[Math.floor(others.length / 2)];
  const took = `its part of an update takes ${milliseconds(slow.own)}, theirs ${milliseconds(middle)}`;
  return `The others wait for rank ${slow.rank} on ${slow.host}: ${took}.`;
}

// A row for each process on each GPU; rows are kept while their process lives.
export function showProcesses({ gpus, time }) {
  const all = gpus.flatMap((gpu) => (gpu.processes ?? []).map((process) => ({ gpu: gpu.index, ...process })));
  all.sort((one, other) => (other.memory ?? -1) - (one.memory ?? -1) || one.pid - other.pid || one.gpu - other.gpu);
  $("processes").hidden = gpus.length === 0;
  document.querySelector("#processes .scroll").hidden = all.length === 0;
  const told = gpus.some((gpu) => gpu.processes !== null);
  $("no-processes").hidden = all.length > 0;
  say($("no-processes"), told ? "No process holds memory of a GPU." : `${UNKNOWN} The driver does not tell.`);
  say($("processes-facts"), all.length > ROWS ? `the ${ROWS} largest of ${count(all.length)}` : "");
  const body = $("rows");
  const rows = new Map([...body.children].map((row) => [row.dataset.key, row]));
  all.slice(0, ROWS).forEach((process, place) => {
    const key = `${process.gpu}:${process.pid}`;
    const row = rows.get(key) ?? copy("a-row");
    rows.delete(key);
    row.dataset.key = key;
    if (body.children[place] !== row) body.insertBefore(row, body.children[place] ?? null);
    showProcess(row, process, time);
  });
  for (const row of rows.values()) row.remove();
}

function showProcess(row, process, time) {
  const [gpu, memory, , pid, user, cpu, kind, runs] = row.cells;
  say(gpu, String(process.gpu));
  say(memory, bytes(process.memory));
  say(row.querySelector(".program"), process.name ?? UNKNOWN);
  row.querySelector(".ours").hidden = !process.ours;
  say(row.querySelector("small"), process.command ?? "");
  row.querySelector("small").title = process.command ?? "";
  say(pid, String(process.pid));
  say(user, process.user ?? UNKNOWN);
  say(cpu, percent(process.cpu));
  say(kind, process.kind);
  say(runs, process.started === null ? UNKNOWN : lasting(time - process.started));
}
