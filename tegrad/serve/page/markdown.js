/** Markdown to elements: made of nodes and texts alone, so that nothing that a model writes is ever markup.
 *
 * Time is linear in the text, whatever it is: nothing is searched for twice, and depths have an end. Pictures become
 * links, since the page asks no other host; HTML is shown as it is written.
 */

import { copier, el } from "./dom.js";

const DEEPEST = 16; // quotes and lists within each other, and marks within each other
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+(.*))?$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s{0,12})([-*+]|\d{1,9}[.)])(?:( {1,4})(?=\S)|\s|$)/;
const TASK = /^\[([ xX])\] /;

/** Show a text in `into`, of which the blocks that did not change stay the nodes that they are. */
export function show(text, into) {
  const blocks = leveled(scan(text.split(/\r?\n/)));
  for (const [index, block] of blocks.entries()) {
    const old = into.childNodes[index];
    const key = JSON.stringify([block.kind, block.level, block.closed, block.lines]);
    if (old?.made === key) continue;
    const node = build(block, 0);
    node.made = key;
    if (old) old.replaceWith(node);
    else into.append(node);
  }
  while (into.childNodes.length > blocks.length) into.lastChild.remove();
}

/** Headings under the page's own, of which none skips a level. */
function leveled(blocks) {
  let last = 2;
  for (const block of blocks) if (block.kind === "heading") block.level = last = Math.min(block.level + 2, last + 1, 6);
  return blocks;
}

// ---- blocks: lines -> {kind, lines, ...} -> an element

const KINDS = [
  ["fence", (line) => FENCE.exec(line), fence],
  ["heading", (line) => HEADING.exec(line), (lines, at, [, marks]) => ({ level: marks.length, end: at + 1 })],
  ["rule", (line) => RULE.test(line), (lines, at) => ({ end: at + 1 })],
  ["quote", (line) => QUOTE.test(line), quote],
  ["list", (line) => ITEM.exec(line), list],
  ["table", (line, next) => line.includes("|") && aligns(next) !== null, table],
];

const blank = (line) => line.trim() === "";
const indent = (line) => line.length - line.trimStart().length;

/** Cut lines into blocks. */
function scan(lines) {
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    if (blank(lines[at])) { at += 1; continue; }
    const block = begun(lines, at) ?? paragraph(lines, at);
    block.lines = lines.slice(at, block.end);
    blocks.push(block);
    at = block.end;
  }
  return blocks;
}

/** The block that begins in a line, unless it is a paragraph. */
function begun(lines, at) {
  for (const [kind, begins, read] of KINDS) {
    const found = begins(lines[at], lines[at + 1]);
    if (found) return { kind, ...read(lines, at, found) };
  }
  return null;
}

/** Whether one does; without looking for its end, so that nothing is gone through twice. */
const begins = (lines, at) => KINDS.some(([, begins]) => begins(lines[at], lines[at + 1]));

function fence(lines, at, [, mark]) {
  let end = at + 1;
  const most = indent(lines[at]) + 3;
  const closes = (line) => indent(line) <= most && line.trim().length >= mark.length
    && line.trim() === mark[0].repeat(line.trim().length);
  while (end < lines.length && !closes(lines[end])) end += 1;
  const closed = end < lines.length;
  return { closed, end: end + Number(closed) };
}

function quote(lines, at) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  return { end };
}

function table(lines, at) {
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  return { end };
}

function list(lines, at, [, spaces, mark]) {
  let end = at + 1;
  const ours = (line) => {
    const item = ITEM.exec(line);
    return item && item[1].length <= spaces.length + 1 && /\d/.test(item[2]) === /\d/.test(mark);
  };
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    if (blank(line)) {
      const next = lines[end + 1];
      if (next === undefined || blank(next) || !(indent(next) > spaces.length || ours(next))) break;
    } else if (indent(line) > spaces.length + 1) {
      const inner = FENCE.exec(line.trimStart());
      if (inner) end = fence(lines, end, inner).end - 1;
    } else if (!ours(line) && (blank(lines[end - 1]) || begins(lines, end))) break;
  }
  return { end };
}

function paragraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && !blank(lines[end]) && !begins(lines, end)) end += 1;
  return { kind: "paragraph", end };
}

const BUILT = {
  paragraph: ({ lines }) => el("p", {}, inline(lines.map((line) => line.trim()).join("\n"))),
  heading: ({ lines, level }, depth) => {
    const words = HEADING.exec(lines[0])[2] ?? "";
    const bare = words.trimEnd();
    const closing = bare.lastIndexOf(" ");
    const shown = /^#+$/.test(bare.slice(closing + 1)) ? bare.slice(0, Math.max(closing, 0)) : bare;
    const nodes = inline(shown.trim());
    return depth ? el("p", {}, el("strong", {}, nodes)) : el(`h${level}`, {}, nodes);
  },
  rule: () => el("hr"),
  quote: ({ lines }, depth) => el("blockquote", {}, built(lines.map((line) => line.replace(QUOTE, "")), depth + 1)),
  fence: ({ lines, closed }) => {
    const code = lines.slice(1, closed ? -1 : undefined).join("\n");
    const language = FENCE.exec(lines[0])[2].trim().split(/\s/)[0];
    return el("div", { class: "code" },
      el("div", { class: "bar" }, el("span", {}, language || "text"), copier(() => code, "Copy code")),
      el("pre", { tabindex: "0" }, el("code", {}, code)));
  },
  table: ({ lines }) => {
    const sides = aligns(lines[1]);
    const row = (line, tag) => {
      const texts = cells(line);
      const cell = (side, at) => el(texts[at] ? tag : "td", { class: side }, inline(texts[at] ?? ""));
      return el("tr", {}, sides.map(cell));
    };
    return el("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Table" }, el("table", {},
      el("thead", {}, row(lines[0], "th")), el("tbody", {}, lines.slice(2).map((line) => row(line, "td")))));
  },
  list: ({ lines }, depth) => {
    const first = ITEM.exec(lines[0]);
    const number = parseInt(first[2], 10);
    const tag = Number.isNaN(number) ? "ul" : "ol";
    const start = tag === "ol" && number !== 1 ? String(number) : undefined;
    return el(tag, { start }, items(lines, first[1].length).map((item) => entry(item, depth)));
  },
};

const build = (block, depth) => BUILT[block.kind](block, depth);

/** The elements of lines within a quote or an item. */
function built(lines, depth) {
  if (depth > DEEPEST) return [el("p", {}, lines.join("\n"))];
  return scan(lines).map((block) => build(block, depth));
}

/** The lines of each item of a list, without its mark and indentation. */
function items(lines, spaces) {
  const found = [];
  let inner = 0;
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (!found.length || (item && item[1].length <= spaces + 1)) {
      inner = item[0].length;
      found.push([line.slice(inner)]);
    } else {
      found.at(-1).push(line.slice(Math.min(indent(line), inner)));
    }
  }
  return found;
}

/** An item: without a paragraph of its own where its text is one. */
function entry(lines, depth) {
  const task = TASK.exec(lines[0]);
  const rest = task ? [lines[0].slice(task[0].length), ...lines.slice(1)] : lines;
  const [first, ...others] = built(rest, depth + 1);
  const tight = first?.tagName === "P" ? [...first.childNodes] : first ? [first] : [];
  return el("li", task ? { class: "task" } : {}, task ? (task[1] === " " ? "☐ " : "☑ ") : [], tight, others);
}

/** The texts between a line's bars. */
function cells(line) {
  const parts = line.trim().replace(/\\\|/g, "\0").split("|").map((part) => part.replaceAll("\0", "|").trim());
  if (parts[0] === "") parts.shift();
  if (parts.at(-1) === "") parts.pop();
  return parts;
}

/** A class for each column, if a line is the one below a table's head. */
function aligns(line) {
  if (!line?.includes("-")) return null;
  const parts = cells(line);
  if (!parts.length || !parts.every((part) => /^:?-+:?$/.test(part))) return null;
  return parts.map((part) => (part.endsWith(":") ? (part.startsWith(":") ? "center" : "right") : undefined));
}

// ---- within a line

const PLAIN = /[^\\`*_~[\]!<h\n]+|[^]/y;
const ESCAPED = /\\([!"#$%&'*+,\-./:;<=>?@^_`{|}~\\])/y; // not brackets: models write formulas between \( and \[
const ADDRESS = String.raw`[^\s<>()]{1,2000}(?:\([^\s<>()]{0,500}\)[^\s<>()]{0,500}){0,8}`;
const TARGET = new RegExp(String.raw`\([ \n]?<?(${ADDRESS})>?(?: "[^"\n]{0,300}")?[ \n]?\)`, "y");
const BARE = /https?:\/\/[^\s<>"`[\]]{1,2000}/y;
const ANGLE = /<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/y;
const RUN = /\*+|_+|~~(?!~)/y;
const WORD = /[\p{L}\p{N}]/u;
const TAGS = { "*": ["em", "strong"], _: ["em", "strong"], "~": ["del", "del"] };

const matched = (pattern, text, at) => {
  pattern.lastIndex = at;
  return pattern.exec(text);
};

/** A link to another page, opened beside this one; only a text where the address is of no such kind. */
function link(address, children) {
  const url = URL.canParse(address) ? new URL(address) : null;
  if (!["http:", "https:", "mailto:"].includes(url?.protocol)) return el("span", {}, children);
  const node = el("a", { href: url.href, target: "_blank", rel: "noopener noreferrer" }, children);
  for (const inner of node.querySelectorAll("a")) inner.replaceWith(...inner.childNodes);
  return node;
}

/** What is open at a place: marks and brackets, each with the nodes since. Closing one takes those above as texts. */
class Open {
  constructor() {
    this.frames = [{ mark: "", count: 0, nodes: [] }];
    this.many = { "*": 0, _: 0, "~": 0, "[": 0 };
  }

  get top() {
    return this.frames.at(-1);
  }

  add(node) {
    this.top.nodes.push(node);
  }

  push(mark, count, text) {
    if (this.frames.length > DEEPEST) return this.add(text);
    this.many[mark] += 1;
    return this.frames.push({ mark, count, text, nodes: [] });
  }

  /** Take the topmost frame away, as the text that it began with or as nothing. */
  pop(literal) {
    const frame = this.frames.pop();
    this.many[frame.mark] -= 1;
    if (literal) for (const node of [literal, ...frame.nodes]) this.add(node);
    return frame;
  }

  /** Make the frame of a mark the topmost one; false where there is none. */
  reach(mark) {
    if (!this.many[mark]) return false;
    while (this.top.mark !== mark) this.pop(this.top.text);
    return true;
  }

  /** Close with a run of marks; what is left of the run. */
  close(mark, count) {
    while (count && this.reach(mark)) {
      const used = Math.min(2, count, this.top.count);
      const { count: had, nodes } = this.pop();
      const node = el(TAGS[mark][used - 1], {}, nodes);
      if (had > used) this.push(mark, had - used, mark.repeat(had - used));
      this.add(node);
      count -= used;
    }
    return count;
  }
}

/** The nodes of a text without blocks. */
function inline(text) {
  const open = new Open();
  for (let at = 0; at < text.length;) at = step(text, at, open);
  while (open.frames.length > 1) open.pop(open.top.text);
  const fragment = document.createDocumentFragment();
  for (const node of joined(open.top.nodes)) fragment.append(node);
  return fragment;
}

/** Texts that follow each other as one. */
function* joined(nodes) {
  let texts = [];
  for (const node of nodes) {
    if (typeof node === "string") { texts.push(node); continue; }
    if (texts.length) yield texts.join("");
    texts = [];
    yield node;
  }
  if (texts.length) yield texts.join("");
}

/** Read what is at a place of the text; where the next thing begins. */
function step(text, at, open) {
  const here = text[at];
  let found;
  if (here === "\n") {
    open.add(el("br"));
    return at + 1;
  }
  if (here === "\\" && (found = matched(ESCAPED, text, at))) {
    open.add(found[1]);
    return at + 2;
  }
  if (here === "`") return code(text, at, open);
  if (here === "<" && (found = matched(ANGLE, text, at))) {
    open.add(link(found[1], [found[1]]));
    return at + found[0].length;
  }
  const begins = here === "h" && !WORD.test(text[at - 1] ?? "");
  if (begins && (found = matched(BARE, text, at))) return bare(found[0], at, open);
  if ((found = matched(RUN, text, at))) return marks(text, at, found[0], open);
  if (here === "[" || (here === "!" && text[at + 1] === "[")) {
    const mark = here === "!" ? "![" : "[";
    open.push("[", 1, mark);
    return at + mark.length;
  }
  if (here === "]") return bracket(text, at, open);
  const plain = matched(PLAIN, text, at)[0];
  open.add(plain);
  return at + plain.length;
}

/** Code between runs of backticks of one length. One that no other closes is the last of its length. */
function code(text, at, open) {
  let end = at;
  while (text[end] === "`") end += 1;
  const run = text.slice(at, end);
  for (let close = text.indexOf(run, end); close >= 0;) {
    let after = close;
    while (text[after] === "`") after += 1;
    if (after - close === run.length) {
      const inner = text.slice(end, close).replaceAll("\n", " ");
      const padded = inner.startsWith(" ") && inner.endsWith(" ") && inner.trim();
      open.add(el("code", {}, padded ? inner.slice(1, -1) : inner));
      return after;
    }
    close = text.indexOf(run, after);
  }
  open.add(run);
  return end;
}

function bare(address, at, open) {
  let end = address.length;
  const inner = address.includes("(");
  while (/[.,:;!?'*_~]/.test(address[end - 1]) || (address[end - 1] === ")" && !inner)) end -= 1;
  const shown = address.slice(0, end);
  open.add(link(shown, [shown]));
  return at + end;
}

function marks(text, at, run, open) {
  const mark = run[0];
  const end = at + run.length;
  const [before, after] = [text[at - 1] ?? " ", text[end] ?? " "];
  const [leans, inside] = [!/\s/.test(after), WORD.test(before) && WORD.test(after)];
  const word = mark === "_" && inside; // snake_case has no emphasis
  const closes = !/\s/.test(before) && !word;
  const count = closes ? open.close(mark, run.length) : run.length;
  const rest = mark.repeat(count);
  if (count && leans && !word) open.push(mark, count, rest);
  else if (count) open.add(rest);
  return end;
}

function bracket(text, at, open) {
  if (!open.reach("[")) {
    open.add("]");
    return at + 1;
  }
  const found = matched(TARGET, text, at + 1);
  if (!found) {
    open.pop(open.top.text);
    open.add("]");
    return at + 1;
  }
  const { text: mark, nodes } = open.pop();
  open.add(link(found[1], [mark === "![" ? "picture: " : [], ...joined(nodes)]));
  return at + 1 + found[0].length;
}
