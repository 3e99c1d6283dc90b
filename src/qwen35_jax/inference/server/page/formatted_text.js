// An answer's text as elements: paragraphs, headings, lists, tables and code, as models mark them. Text becomes nodes
// and never markup, and what is not understood is shown as it stands.

const FENCE = /^\s*(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const RULE = /^\s*(?:-{3,}|\*{3,}|_{3,})\s*$/;
const ITEM = /^(\s*)(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const CODE = /(`+)(?!`)(.*?[^`])\1(?!`)/;
const STRONG = /\*\*(?=\S)(.*?\S)\*\*(?!\*)/;
const EMPHASIS = /(?<![\w*])\*(?=[^\s*])(.*?[^\s*])\*(?![\w*])/;
const INLINE = new RegExp([CODE, STRONG, EMPHASIS].map((part) => part.source).join("|"), "gs");

/** Text that grows. Blocks that have not changed stay the same elements, so that a selection in them lasts. */
export class FormattedText {
  /** @param {HTMLElement} element that holds the text */
  constructor(element) {
    this.element = element;
    this.shown = [];
  }

  /** @param {string} text all of it so far */
  show(text) {
    const blocks = blocksOf(text);
    const keys = blocks.map((block) => JSON.stringify(block));
    let same = 0;
    while (same < keys.length && keys[same] === this.shown[same]) same += 1;
    while (this.element.childNodes.length > same) this.element.lastChild.remove();
    this.element.append(...blocks.slice(same).map(blockElement));
    this.shown = keys;
  }
}

/** Cuts a text into blocks, each with its kind and its lines. */
function blocksOf(text) {
  const blocks = [];
  let block = null; // the one that a line may belong to
  let gap = false; // whether an empty line came before
  const begin = (kind, lines, more = {}) => {
    block = { kind, lines, ...more };
    blocks.push(block);
  };
  for (const line of text.split("\n")) {
    const fence = FENCE.exec(line);
    if (block?.kind === "code") {
      if (fence && fence[1].startsWith(block.fence) && !fence[2]) block = null;
      else block.lines.push(line);
      continue;
    }
    const item = ITEM.exec(line);
    if (fence) {
      begin("code", [], { fence: fence[1], language: fence[2].trim() });
    } else if (!line.trim()) {
      if (block?.kind !== "list") block = null;
    } else if (HEADING.test(line) || RULE.test(line)) {
      begin(RULE.test(line) ? "rule" : "heading", [line]);
      block = null;
    } else if (item) {
      if (block?.kind !== "list") begin("list", []);
      block.lines.push(line);
    } else if (block?.kind === "paragraph" && block.lines.length === 1 && isTable(block.lines[0], line)) {
      block.kind = "table";
    } else if (block && !(gap && !line.startsWith(" "))) {
      block.lines.push(line);
    } else {
      begin("paragraph", [line]);
    }
    gap = !line.trim();
  }
  return blocks;
}

function isTable(heading, rule) {
  return rule.includes("|") && TABLE_RULE.test(rule) && cells(heading).length === cells(rule).length;
}

function blockElement({ kind, lines, language }) {
  if (kind === "code") return codeElement(lines, language);
  if (kind === "list") return listElement(lines);
  if (kind === "table") return tableElement(lines);
  if (kind === "rule") return document.createElement("hr");
  if (kind === "heading") {
    const [, marks, title] = HEADING.exec(lines[0]);
    // The page's own headings come first: those of an answer stand below them.
    return inline(marks.length === 1 ? "h3" : "h4", title);
  }
  return inline("p", lines.join("\n"));
}

function codeElement(lines, language) {
  const element = document.createElement("pre");
  const code = document.createElement("code");
  code.textContent = lines.join("\n");
  if (language) element.dataset.language = language;
  element.tabIndex = 0; // it may have to be scrolled
  element.append(code);
  return element;
}

/** A list whose items may hold lists: those that stand further to the right. */
function listElement(lines) {
  const open = []; // the lists that an item may belong to, the innermost last
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (!item) {
      open.at(-1).element.lastElementChild.append(`\n${line.trim()}`);
      continue;
    }
    const [, space, number, text] = item;
    while (open.length > 1 && space.length < open.at(-1).indent) open.pop();
    if (!open.length || space.length > open.at(-1).indent + 1) {
      const element = document.createElement(number === undefined ? "ul" : "ol");
      if (number !== undefined) element.start = Number(number);
      open.at(-1)?.element.lastElementChild.append(element);
      open.push({ element, indent: space.length });
    }
    open.at(-1).element.append(inline("li", text));
  }
  return open[0].element;
}

function tableElement(lines) {
  const element = document.createElement("div"); // scrolls where the table is wider than the page
  const table = document.createElement("table");
  element.className = "table";
  element.tabIndex = 0;
  element.append(table);
  lines.forEach((line, index) => {
    const row = table.insertRow();
    row.append(...cells(line).map((cell) => inline(index ? "td" : "th", cell)));
  });
  return element;
}

function cells(line) {
  const bare = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return bare.split("|").map((cell) => cell.trim());
}

/** An element with a text in which what stands between backticks or stars is marked. */
function inline(tag, text) {
  const element = document.createElement(tag);
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    const [whole, , code, strong, emphasis] = match;
    const marked = document.createElement(code !== undefined ? "code" : strong !== undefined ? "strong" : "em");
    marked.textContent = code ?? strong ?? emphasis;
    element.append(text.slice(end, match.index), marked);
    end = match.index + whole.length;
  }
  element.append(text.slice(end));
  return element;
}
