"use strict";
// The page shows what Python computed: it looks results up by the controls' positions and draws them, and computes nothing itself.
const R = JSON.parse(document.getElementById("results").textContent);
const TABLES = JSON.parse(document.getElementById("tables").textContent);
const $ = (id) => document.getElementById(id);
const state = { language: document.documentElement.lang, theme: "auto", device: R.axes.device[0], length: "4096", dim: "64", mask: "causal", tile: "plan",
  schedule: "v2", row: "", data: "random", record: "0", access: "column" };

function w(key, values) {
  const text = TABLES[state.language][key];
  if (text === undefined) throw new Error("no word " + key);
  return values ? text.replace(/\{(\w+)\}/g, (_, name) => values[name]) : text;
}
// a sentence that the library wrote in English
const t = (text) => (state.language === "zh" && R.phrases[text]) || text;
// what a chart shows, in the sentences that Python filled; a gap with @ is a key of the texts
function conclude(chart, key) {
  const said = (R.says[chart] || {})[key] || [], filled = (gaps) => Object.fromEntries(Object.entries(gaps).map(([gap, value]) => [gap, value[0] === "@" ? w(value.slice(1)) : value]));
  const text = said.map(([sentence, gaps]) => w(sentence, filled(gaps))).map((part) => (state.language === "zh" ? part : part.charAt(0).toUpperCase() + part.slice(1))).join(state.language === "zh" ? "" : " ");
  $(chart + "-k").replaceChildren(...prose("p", text).childNodes);
  $(chart + "-k").hidden = !text;
}
function scaled(value, units, step) {
  let i = 0;
  while (Math.abs(value) >= step && i < units.length - 1) { value /= step; i++; }
  return (value >= 100 ? value.toFixed(0) : value.toPrecision(3).replace(/\.?0+$/, "")) + " " + units[i];
}
const bytes = (n) => scaled(n, ["B", "KiB", "MiB", "GiB", "TiB"], 1024);
const flops = (n) => scaled(n, ["FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s"], 1000);
const each = (n, unit) => scaled(n, [unit, "k" + unit, "M" + unit, "G" + unit, "T" + unit], 1000);
const seconds = (s) => (s >= 1 ? s.toPrecision(3) + " s" : s >= 1e-3 ? (s * 1e3).toPrecision(3) + " ms" : (s * 1e6).toPrecision(3) + " µs");
const percent = (x, digits) => (100 * x).toFixed(digits === undefined ? 0 : digits) + "%";
const count = (n) => n.toLocaleString("en-US");
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const narrow = () => window.innerWidth < 760;

function element(tag, text, attributes) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
  return made;
}
function prose(tag, text, kind) {
  // text in which `code` is set as code
  const made = element(tag, undefined, kind ? { class: kind } : {});
  text.split("`").forEach((part, i) => made.append(i % 2 ? element("code", part) : document.createTextNode(part)));
  return made;
}
function fillTable(id, caption, head, rows) {
  const table = $(id);
  table.replaceChildren();
  if (caption) table.append(element("caption", caption));
  const line = (cells, tag) => {
    const row = element("tr");
    for (const cell of cells) {
      const options = cell && cell.text !== undefined ? cell : { text: cell };
      row.append(element(tag, options.text, options.kind ? { class: options.kind } : {}));
    }
    if (cells.chosen) row.className = "chosen";
    return row;
  };
  if (head) table.append(line(head, "th"));
  for (const row of rows) table.append(line(row, "td"));
}
const n = (text) => ({ text, kind: "n" });

function draw(id, traces, layout) {
  const ink = css("ink"), line = css("line"), dim = css("dim");
  const axis = { gridcolor: line, linecolor: line, zerolinecolor: line, tickfont: { color: dim }, title: { font: { color: dim, size: 13 }, standoff: 8 }, automargin: true };
  const base = { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family: "system-ui, sans-serif", size: 13, color: ink },
    margin: narrow() ? { l: 12, r: 8, t: 10, b: 12 } : { l: 20, r: 16, t: 14, b: 20 }, hoverlabel: { bgcolor: css("card"), bordercolor: line, font: { color: ink } },
    legend: { orientation: "h", y: -0.2, x: 0, font: { color: ink } }, dragmode: false };
  // the height as it is now: plotly follows the window only, not a chart that grows with its rows
  const whole = Object.assign(base, { height: $(id).clientHeight }, layout);
  for (const name of Object.keys(layout)) if (/^[xy]axis/.test(name)) {
    whole[name] = Object.assign({}, axis, layout[name]);
    if (typeof layout[name].title === "string") whole[name].title = Object.assign({}, axis.title, { text: layout[name].title });
  }
  const heading = $(id).closest("section").querySelector("h2").textContent;
  $(id).setAttribute("role", "img");
  $(id).setAttribute("aria-label", heading);
  Plotly.react(id, traces, whole, { responsive: true, displayModeBar: false });
}

// a legend of its own, which wraps where plotly's would be cut off
function legend(id, entries) {
  $(id).replaceChildren(...entries.map(([name, colour]) => { const key = element("span", name), swatch = element("i"); swatch.style.background = css(colour); key.prepend(swatch); return key; }));
}
const COLOURS = { standard: "red", v1: "amber", v2: "teal", plan: "blue" };
const TENSORS = { Q: "blue", K: "teal", V: "amber", O: "violet", S: "red", E: "pink", P: "green", acc: "slate" };
const ORDER = Object.keys(TENSORS);
const WAYS = ["standard", "v1", "v2", "plan"];
const position = () => [state.device, state.length, state.dim, state.mask, state.tile].join("|");
const chosen = () => R.results[position()];

function fillFigures(id, device) {
  const written = { clock_hz: (v) => each(v, "Hz"), dram_bandwidth: (v) => each(v, "B/s"), l2_bandwidth: (v) => each(v, "B/s"), exp_rate: (v) => each(v, "/s"), units: (v) => count(v) };
  const rows = device.figures.map((f) => [w("f." + f.name), n((written[f.name] || bytes)(f.value)), { text: t(f.source), kind: "s" }]);
  for (const [dtype, value] of Object.entries(device.peak)) rows.push([w("f.peak", { dtype }), n(flops(value)), { text: t(device.peakSource), kind: "s" }]);
  fillTable(id, "", [w("figure"), n(w("value")), w("source")], rows);
}
function showMachine() {
  const device = R.devices[state.device];
  $("machine-p").textContent = w("machine.p");
  $("allFigures").textContent = w("machine.all", { name: device.name });
  $("hereAll").textContent = w("machine.all", { name: R.devices.here.name });
  fillFigures("figures", device);
  fillFigures("hereFigures", R.devices.here);
  const m = R.devices.here.measured, here = [], spread = (name) => n(m.spread[name] === undefined ? "–" : percent(m.spread[name]));
  for (const [dtype, value] of Object.entries(m.gemm)) here.push([w("f.gemm", { dtype }), n(flops(value)), spread("gemm " + dtype)]);
  here.push([w("f.copy"), n(each(m.copy, "B/s")), spread("copy")], [w("f.read"), n(each(m.read, "B/s")), spread("read")], [w("f.exp"), n(each(m.exp, "/s")), spread("exp")]);
  fillTable("ceilings", m.device + ", " + w("measured") + " " + m.date + ", " + m.software, [w("figure"), n(w("value")), n(w("spread"))], here);
}

function showNumbers() {
  const found = chosen(), map = tileCounts();
  const facts = [
    [found.less.toPrecision(3) + "×", w("n.less")],
    [percent(map.total ? map.empty / map.total : 0), w("n.skipped")],
    found.predicted === null ? [seconds(found.schedules.plan.seconds), w("n.least")] : [seconds(found.predicted), w("n.time")],
  ];
  const kind = found.by === "model" ? "runs.model" : found.tile === found.runs ? "runs.it" : found.refused ? "runs.refused" : "runs.yours";
  const passes = Object.entries(found.passes).map(([pass, tile]) => w("p." + pass) + " " + tile).join(", ");
  $("runs").textContent = w(kind, found) + (passes && !found.refused ? " " + w("runs.all", { passes }) : "");
  if (found.binding) facts.push([w("r." + found.binding), w("n.binding")]);
  else facts.push([bytes(Object.values(found.onChip).reduce((a, b) => a + b, 0)), w("f.sram_bytes")]);
  $("numbers").replaceChildren(...facts.map(([value, words]) => { const box = element("div"); box.append(element("b", value), element("span", words)); return box; }));
}
