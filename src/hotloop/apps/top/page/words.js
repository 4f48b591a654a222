// Numbers as people read them. What is not known is "–", never 0.

export const UNKNOWN = "–";

const known = (number) => typeof number === "number" && Number.isFinite(number);
const grouped = (number, digits = 0) =>
  number.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

export const percent = (number) => (known(number) ? `${grouped(number)}%` : UNKNOWN);
export const count = (number, unit = "") => (known(number) ? `${grouped(number)}${unit}` : UNKNOWN);
export const watts = (number) => count(number, " W");
export const milliseconds = (seconds) =>
  known(seconds) ? `${grouped(1000 * seconds, seconds < 0.01 ? 2 : seconds < 0.1 ? 1 : 0)} ms` : UNKNOWN;
export const degrees = (number) => count(number, " °C");

export function bytes(number) {
  if (!known(number)) return UNKNOWN;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (Math.abs(number) >= 1023.95 && unit < units.length - 1) {
    number /= 1024;
    unit += 1;
  }
  return `${grouped(number, unit && number < 100 ? 1 : 0)} ${units[unit]}`;
}

export const rate = (number) => (known(number) ? `${bytes(number)}/s` : UNKNOWN);

export function lasting(seconds) {
  if (!known(seconds) || seconds < 0) return UNKNOWN;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 1) return `${Math.floor(seconds)} s`;
  if (minutes < 60) return `${minutes} min`;
  if (minutes < 1440) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${Math.floor(minutes / 1440)} d ${Math.floor((minutes % 1440) / 60)} h`;
}

export const plural = (number, one, many = `${one}s`) => `${grouped(number)} ${number === 1 ? one : many}`;

export const sentence = (words) => words.charAt(0).toUpperCase() + words.slice(1);

const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
export const at = (time) => clock.format(time * 1000);

// What is put into the page is put in as text, here and nowhere else. A node that says the same already is left
// alone, so that a selection survives.
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// The same, with `commands` set as code.
export function sayWithCode(node, text) {
  if (node.dataset.said === text) return;
  node.dataset.said = text;
  const parts = text.split(/`([^`]+)`/);
  node.replaceChildren(
    ...parts.map((part, i) => {
      if (i % 2 === 0) return document.createTextNode(part);
      const code = document.createElement("code");
      code.textContent = part;
      return code;
    }),
  );
}

export function sayList(list, lines) {
  while (list.children.length > lines.length) list.lastElementChild.remove();
  while (list.children.length < lines.length) list.append(document.createElement("li"));
  lines.forEach((line, i) => sayWithCode(list.children[i], line));
}
