// A textarea that behaves as an editor: it grows, it indents, and below it the same text is painted in colours.

const WORDS = "and as assert async await break class continue def del elif else except finally for from global if import in is lambda nonlocal not or pass raise return try while with yield True False None".split(" ").join("|");
const PARTS = new RegExp(
  [
    /(?<c>#[^\n]*)/, /(?<s>[rbfuRBFU]{0,2}(?:"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?))/,
    new RegExp(`\\b(?<b>${WORDS})\\b`), /\b(?<n>\d[\w.]*)/, /(?<=\b(?:def|class)\s+)(?<d>\w+)/, /\w+/,
  ].map((part) => part.source).join("|"), "g");

export class Editor {
  constructor(box, { run, changed = () => {} }) {
    this.area = box.querySelector("textarea");
    this.paint = box.querySelector(".paint");
    this.start = this.area.dataset.start;
    this.changed = changed;
    this.leaving = false; // after Escape, Tab goes on to the next control
    this.area.classList.add("painted");
    this.area.addEventListener("input", () => this.show());
    this.area.addEventListener("scroll", () => { this.paint.scrollLeft = this.area.scrollLeft; });
    this.area.addEventListener("blur", () => { this.leaving = false; });
    this.area.addEventListener("keydown", (event) => this.key(event, run));
    this.show();
  }

  get text() { return this.area.value; }

  set text(words) {
    this.area.focus();
    this.area.select();
    this.insert(words);
  }

  get isChanged() { return this.text.trimEnd() !== this.start.trimEnd(); }

  focus() { this.area.focus(); }

  // As if it had been typed, so that it can be undone.
  insert(words) {
    const done = words === "" ? document.execCommand("delete") : document.execCommand("insertText", false, words);
    if (!done) {
      this.area.setRangeText(words, this.area.selectionStart, this.area.selectionEnd, "end");
      this.show();
    }
  }

  show() {
    this.area.rows = this.text.split("\n").length;
    this.paint.replaceChildren(...painted(this.text), "\n");
    this.paint.scrollLeft = this.area.scrollLeft;
    this.changed();
  }

  key(event, run) {
    if (event.isComposing) return;
    if (event.key === "Enter" && (event.shiftKey || event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      run(event.shiftKey);
    } else if (event.key === "Escape") {
      this.leaving = true;
    } else if (event.key === "Tab" && !this.leaving && !event.ctrlKey && !event.altKey && !event.metaKey) {
      event.preventDefault();
      this.indent(event.shiftKey);
    } else if (event.key === "Enter") {
      event.preventDefault();
      const line = this.text.slice(0, this.area.selectionStart).split("\n").at(-1);
      this.insert("\n" + line.match(/^ */)[0] + (/:\s*(#.*)?$/.test(line) ? "    " : ""));
    }
  }

  // All lines of the selection by four spaces, or by as many as there are to the left.
  indent(less) {
    const { selectionStart: from, selectionEnd: to } = this.area;
    if (!less && from === to) {
      this.insert(" ".repeat(4 - ((from - (this.text.lastIndexOf("\n", from - 1) + 1)) % 4)));
      return;
    }
    const begin = this.text.lastIndexOf("\n", from - 1) + 1;
    const block = this.text.slice(begin, to);
    const moved = less ? block.replace(/^ {1,4}/gm, "") : block.replace(/^(?=.)/gm, "    ");
    if (moved === block) return;
    this.area.setSelectionRange(begin, to);
    this.insert(moved);
    const kept = Math.max(begin, from + (less ? Math.min(0, moved.length - block.length) : 4));
    this.area.setSelectionRange(from === to ? kept : begin, begin + moved.length);
  }
}

// Nodes of the text, those that have a colour in elements of their own.
function painted(text) {
  const nodes = [];
  let last = 0;
  for (const found of text.matchAll(PARTS)) {
    const [kind] = Object.entries(found.groups).find(([, words]) => words !== undefined) ?? [];
    if (kind === undefined) continue;
    nodes.push(text.slice(last, found.index));
    const part = document.createElement(kind === "b" ? "b" : "span");
    part.className = kind;
    part.textContent = found[0];
    nodes.push(part);
    last = found.index + found[0].length;
  }
  nodes.push(text.slice(last));
  return nodes;
}
