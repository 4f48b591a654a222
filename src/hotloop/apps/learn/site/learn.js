// Joins the pages to the server: steps that run, exercises that are checked, questions that are answered.

import { Editor } from "./editor.js";

const main = document.querySelector("main");
const lesson = Number(main.dataset.lesson);
const trouble = document.querySelector("#trouble");

class Refused extends Error {}

// The answer to a request that does something; an error that says what to do where there is none.
async function ask(path, data) {
  let response;
  try {
    const headers = { "Content-Type": "application/json" };
    response = await fetch(`/api/${path}`, { method: "POST", headers, body: JSON.stringify(data) });
  } catch {
    throw new Refused("The server does not answer. Is `hotloop learn --web` still running?");
  }
  if (response.status === 401) throw new Refused("This server does not know this page any more: open the address that `hotloop learn --web` printed.");
  if (!response.ok) {
    const told = await response.json().catch(() => ({ error: response.statusText, fix: "load the page again" }));
    throw new Refused(`${told.error}. ${told.fix}`);
  }
  return response;
}

const askFor = async (path, data) => (await ask(path, data)).json();

function complain(error) {
  if (!(error instanceof Refused)) throw error;
  trouble.textContent = error.message;
  trouble.hidden = false;
  trouble.scrollIntoView({ block: "nearest" });
}

const quiet = () => { trouble.hidden = true; };

function tell(element, words, kind = "") {
  element.textContent = words;
  element.className = `told ${kind}`;
}

const lasting = (seconds) => (seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(1)} s`);

// Steps.

const cells = [...document.querySelectorAll(".cell")].map((box) => new Cell(box));
let ran = new Set(); // steps that the process of this lesson has run
let running = null;

function Cell(box) {
  Object.assign(this, {
    box, number: Number(box.dataset.step), raises: "raises" in box.dataset, button: box.querySelector(".run"),
    output: box.querySelector(".output"), told: box.querySelector(".told"),
  });
  const restore = box.querySelector(".restore");
  this.editor = new Editor(box.querySelector(".editor"), {
    run: (goOn) => runUpTo(this, goOn),
    changed: () => { restore.hidden = !(this.editor?.isChanged); },
  });
  this.button.addEventListener("click", () => (running === this ? stop() : runUpTo(this)));
  restore.addEventListener("click", () => { this.editor.text = this.editor.start; });
}

// A step needs what earlier ones have made: those that were not run yet are run first.
async function runUpTo(cell, goOn = false) {
  if (running !== null) return;
  quiet();
  if (goOn) cells[cells.indexOf(cell) + 1]?.editor.focus();
  try {
    for (const each of cells.slice(0, cells.indexOf(cell) + 1)) {
      if ((each === cell || !ran.has(each.number)) && !(await run(each))) break;
    }
  } catch (error) {
    complain(error);
  }
}

// Whether the lesson can go on after it.
async function run(cell) {
  running = cell;
  cell.output.replaceChildren();
  cell.output.hidden = true;
  cell.box.classList.remove("failed");
  cell.box.classList.add("running");
  tell(cell.told, "running");
  busy(true);
  try {
    const response = await ask("run", { lesson, step: cell.number, code: cell.editor.text });
    for await (const line of linesOf(response)) {
      if ("output" in line) print(cell, line.output);
      else return ended(cell, line);
    }
    throw new Refused("The server ended before the step did.");
  } catch (error) {
    tell(cell.told, "it did not run", "bad");
    throw error;
  } finally {
    cell.box.classList.remove("running");
    running = null;
    busy(false);
  }
}

function print(cell, words) {
  cell.output.hidden = false;
  const below = cell.output.scrollHeight - cell.output.scrollTop - cell.output.clientHeight < 30;
  cell.output.append(words);
  if (below) cell.output.scrollTop = cell.output.scrollHeight;
}

function ended(cell, { end, ran: those, done }) {
  ran = new Set(those);
  if (done) chip(document.querySelector("#state"), "done", "done");
  if (end.ended) {
    cell.box.classList.add("failed");
    tell(cell.told, `${sentence(end.ended)} The next step begins with new variables.`, "bad");
    return false;
  }
  const meant = cell.raises && !cell.editor.isChanged;
  const failed = end.error !== null && !meant;
  cell.box.classList.toggle("failed", failed);
  if (failed) tell(cell.told, end.error, "bad");
  else tell(cell.told, end.error === null ? lasting(end.seconds) : `this error is meant, ${lasting(end.seconds)}`, "good");
  return true;
}

const sentence = (words) => words.charAt(0).toUpperCase() + words.slice(1);

async function* linesOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) yield JSON.parse(line);
  }
}

function busy(is) {
  for (const cell of cells) {
    const mine = is && cell === running;
    cell.button.textContent = mine ? "Stop" : "Run";
    cell.button.classList.toggle("stop", mine);
    cell.button.disabled = is && !mine;
  }
  document.querySelector("#run-all").disabled = is;
}

const stop = () => askFor("stop", { lesson }).catch(complain);

function chip(element, words, kind) {
  element.textContent = words;
  element.className = `chip ${kind}`;
  element.hidden = false;
}

// The exercise.

function openExercise(box) {
  const [button, told, restore, show] = [".check", ".told", ".restore", ".solution"].map((name) => box.querySelector(name));
  let saving = 0;
  let saved = null;
  const save = async () => {
    clearTimeout(saving);
    saving = 0;
    if (saved === editor.text) return;
    saved = editor.text;
    await askFor("save", { lesson, text: saved }).catch(complain);
  };
  const check = async () => {
    if (button.disabled) return;
    clearTimeout(saving);
    quiet();
    button.disabled = true;
    box.classList.add("running");
    tell(told, "checking");
    try {
      saved = editor.text;
      judged(box, await askFor("check", { lesson, text: saved }));
      show.hidden = false;
    } catch (error) {
      tell(told, "it was not checked", "bad");
      complain(error);
    } finally {
      button.disabled = false;
      box.classList.remove("running");
    }
  };
  const editor = new Editor(box.querySelector(".editor"), {
    run: check,
    changed: () => {
      if (!box.editor) return; // it is being made
      restore.hidden = !box.editor.isChanged;
      clearTimeout(saving);
      saving = setTimeout(save, 800);
    },
  });
  box.editor = editor;
  saved = editor.text;
  restore.hidden = !editor.isChanged;
  show.hidden = document.querySelector("#checked").hidden;
  button.addEventListener("click", check);
  editor.area.addEventListener("blur", () => saving && save());
  addEventListener("pagehide", () => saving && save());
  restore.addEventListener("click", () => { editor.text = editor.start; });
  show.addEventListener("click", async () => {
    try {
      const details = box.querySelector(".answer");
      details.querySelector("pre").textContent = (await askFor("solution", { lesson })).text;
      details.hidden = false;
      details.open = true;
      show.hidden = true;
    } catch (error) {
      complain(error);
    }
  });
}

function judged(box, { verdicts, passed, right, device, output }) {
  const list = box.querySelector(".verdicts");
  list.replaceChildren(...verdicts.map((verdict) => {
    const item = document.createElement("li");
    const mark = document.createElement("span");
    mark.className = "mark";
    mark.textContent = verdict.right ? "right" : "not";
    item.className = mark.textContent;
    item.append(mark, ...coded(verdict.what));
    if (!verdict.right && verdict.hint) {
      const hint = document.createElement("p");
      hint.append("Hint: ", ...coded(verdict.hint));
      item.append(hint);
    }
    return item;
  }));
  list.hidden = false;
  list.scrollIntoView({ block: "nearest" });
  const printed = box.querySelector(".printed");
  printed.hidden = !output;
  printed.querySelector("pre").textContent = output;
  const count = `${right} of ${verdicts.length} right`;
  const where = device ? `, it ran on ${device}` : "";
  tell(box.querySelector(".told"), passed ? `Solved${where}.` : `${count}${where}. Edit it, then check again.`, passed ? "good" : "bad");
  const state = document.querySelector("#checked");
  if (passed || state.textContent !== "passed") chip(state, passed ? "passed" : count, passed ? "done" : "opened");
}

// `words` between backticks as code.
function coded(words) {
  return words.split("`").map((part, place) => {
    if (place % 2 === 0) return part;
    const code = document.createElement("code");
    code.textContent = part;
    return code;
  });
}

// The quiz.

function openQuestion(form) {
  const [why, button, state] = [form.querySelector(".why"), form.querySelector("button"), form.querySelector(".chip")];
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (button.disabled) return;
    quiet();
    button.disabled = true;
    try {
      const given = new FormData(form).get("given");
      const told = await askFor("answer", { question: form.dataset.question, given });
      const said = document.createElement("strong");
      said.textContent = told.right ? "Right." : "Not so. Right is:";
      why.replaceChildren(said, ...(told.right ? [] : [...coded(told.answer), ". "]), ...coded(told.why));
      why.className = `why ${told.right ? "good" : ""}`;
      chip(state, told.right ? "right" : "not yet right", told.right ? "done" : "opened");
      document.querySelector("#score").textContent = told.score;
    } catch (error) {
      complain(error);
    } finally {
      button.disabled = false;
    }
  });
}

if (cells.length) {
  document.querySelector("#run-all").addEventListener("click", async () => {
    quiet();
    try {
      for (const cell of cells) if (running !== null || !(await run(cell))) break;
    } catch (error) {
      complain(error);
    }
  });
  openExercise(document.querySelector(".exercise"));
  askFor("open", { lesson }).then((told) => { ran = new Set(told.ran); }).catch(complain);
}
document.querySelectorAll(".question").forEach(openQuestion);
