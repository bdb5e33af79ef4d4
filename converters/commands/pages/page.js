"use strict";
const facts = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
function make(name, text, kind) {
  const element = document.createElement(name);
  // A name may break after a dot, a stroke or a slash.
  if (text !== undefined) String(text).split(/(?<=[._/])(?=[a-z*])/i).forEach((part, n) => element.append(...(n ? [make("wbr")] : []), part));
  if (kind) element.className = kind;
  return element;
}
function size(bytes) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (bytes < 1000) return unit === "B" ? `${bytes} B` : `${bytes.toFixed(1)} ${unit}`;
    bytes /= 1000;
  }
  return `${bytes.toFixed(2)} TB`;
}
const count = number => number.toLocaleString("en");
const plural = (number, noun) => number === 1 ? noun : `${noun}s`;
function showFacts(pairs) {
  for (const [value, what] of pairs) {
    const item = make("li");
    item.append(make("b", value), ` ${what}`);
    $("facts").append(item);
  }
}
function table(heads, rows) {  // cells that are numbers are aligned right
  const body = make("table"), head = make("tr");
  heads.forEach((text, number) =>
    head.append(make("th", text, rows.length && typeof rows[0][number] === "number" ? "n" : "")));
  if (heads.length) body.append(head);
  for (const cells of rows) {
    const row = make("tr");
    cells.forEach((cell, number) => {
      const made = typeof cell === "number" ? make("td", count(cell), "n") : make("td", cell);
      if (heads[number]) made.dataset.head = heads[number];
      row.append(made);
    });
    body.append(row);
  }
  return body;
}
// A line that opens: `fill(body)` is called once, when it does.
function opening(name, layers, what, keys, right, fill) {
  const row = make("details"), line = make("summary"), body = make("div"), title = make("span");
  title.append(make("b", name), layers ? ` layer${/\D/.test(layers) ? "s" : ""} ${layers}` : "");
  line.append(title, what, make("span", keys, "mono dim keys"), make("span", right, "size"));
  row.append(line, body);
  row.addEventListener("toggle", () => { if (row.open && !body.childNodes.length) fill(body); });
  $("kinds").append(row);
  return row;
}
// A choice of one of several, shown below it; the first one that the search finds is chosen.
function choice(body, labels, texts, show) {
  const shown = make("div");
  const choose = number => shown.replaceChildren(...show(number));
  const start = Math.max(0, texts.findIndex(text => words().every(word => text.includes(word))));
  if (labels.length > 1) {
    const menu = make("select");
    menu.setAttribute("aria-label", "layer");
    labels.forEach((label, number) => { const option = make("option", label); option.value = number; menu.append(option); });
    menu.value = start;
    menu.onchange = () => choose(menu.value);
    body.append(menu);
  }
  body.append(shown);
  choose(start);
}
const words = () => $("find").value.toLowerCase().split(/\s+/).filter(Boolean);
// The search: rows whose text has every word; `page.html#up_proj` is one.
function searchable(rows, texts, noun, after = "", also = () => {}) {
  function find() {
    const wanted = words();
    let found = 0;
    rows.forEach((row, number) => {
      row.hidden = !wanted.every(word => texts[number].includes(word));
      found += !row.hidden;
    });
    also(wanted);
    $("found").textContent = (wanted.length ? `${found} of ${rows.length} ${noun}` : `${rows.length} ${noun}`) + after;
  }
  $("find").addEventListener("input", find);
  $("find").value = decodeURIComponent(location.hash.slice(1));
  find();
  const left = rows.filter(row => !row.hidden);
  if ($("find").value && left.length === 1) left[0].open = true;
}
// Files with their sizes as bars, found by name.
function showFiles(files) {
  const most = Math.max(1, ...files.map(file => file[1]));
  const rows = files.map(([name, bytes, tensors]) => {
    const row = make("tr"), cell = make("td"), bar = make("div", "", "bar");
    bar.style.width = `${100 * bytes / most}%`;
    cell.append(bar);
    row.append(make("td", name), make("td", count(tensors), "n"), make("td", size(bytes), "n"), cell);
    document.querySelector("#files tbody").append(row);
    return row;
  });
  return wanted => {
    const found = files.map(file => wanted.every(word => file[0].toLowerCase().includes(word)));
    rows.forEach((row, number) => { row.hidden = found.some(Boolean) && !found[number]; });
  };
}
