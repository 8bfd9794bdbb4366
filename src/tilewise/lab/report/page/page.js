"use strict";
// The page shows what Python computed: it looks results up by the controls' positions and draws them, and computes nothing itself.
const R = JSON.parse(document.getElementById("results").textContent);
const TABLES = JSON.parse(document.getElementById("tables").textContent);
const $ = (id) => document.getElementById(id);
const state = { language: document.documentElement.lang, theme: "auto", device: R.axes.device[0], length: "4096", dim: "64", mask: "causal", tile: "plan",
  schedule: "v2", row: "", data: "random", record: "0" };

function w(key, values) {
  const text = TABLES[state.language][key];
  if (text === undefined) throw new Error("no word " + key);
  return values ? text.replace(/\{(\w+)\}/g, (_, name) => values[name]) : text;
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
  const whole = Object.assign(base, layout);
  for (const name of Object.keys(layout)) if (/^[xy]axis/.test(name)) {
    whole[name] = Object.assign({}, axis, layout[name]);
    if (typeof layout[name].title === "string") whole[name].title = Object.assign({}, axis.title, { text: layout[name].title });
  }
  const heading = $(id).closest("section").querySelector("h2").textContent;
  $(id).setAttribute("role", "img");
  $(id).setAttribute("aria-label", heading);
  Plotly.react(id, traces, whole, { responsive: true, displayModeBar: false });
}

const COLOURS = { standard: "red", v1: "amber", v2: "teal", plan: "blue" };
const TENSORS = { Q: "blue", K: "teal", V: "green", O: "violet", LSE: "slate", S: "red", P: "amber", E: "pink", acc: "brown", m: "slate", l: "pink", rowmax: "slate", rowsum: "slate", mask: "pink", bias: "green" };
const WAYS = ["standard", "v1", "v2", "plan"];
const chosen = () => R.results[[state.device, state.length, state.dim, state.mask, state.tile].join("|")];

function showMachine() {
  const device = R.devices[state.device];
  $("machine-p").textContent = w("machine.p");
  $("allFigures").textContent = w("machine.all", { name: device.name });
  const written = { clock_hz: (v) => each(v, "Hz"), dram_bandwidth: (v) => each(v, "B/s"), l2_bandwidth: (v) => each(v, "B/s"), exp_rate: (v) => each(v, "/s"), units: (v) => count(v) };
  const rows = device.figures.map((f) => [w("f." + f.name), n((written[f.name] || bytes)(f.value)), { text: f.source, kind: "s" }]);
  for (const [dtype, value] of Object.entries(device.peak)) rows.push([w("f.peak", { dtype }), n(flops(value)), { text: device.peakSource, kind: "s" }]);
  fillTable("figures", "", [w("figure"), n(w("value")), w("source")], rows);
  const m = R.devices.here.measured, here = [];
  for (const [dtype, value] of Object.entries(m.gemm)) here.push([w("f.gemm", { dtype }), n(flops(value))]);
  here.push([w("f.copy"), n(each(m.copy, "B/s"))], [w("f.read"), n(each(m.read, "B/s"))], [w("f.exp"), n(each(m.exp, "/s"))]);
  fillTable("ceilings", m.device + ", " + w("measured") + " " + m.date + ", " + m.software, [w("figure"), n(w("value"))], here);
}

function showNumbers() {
  const found = chosen(), map = tileCounts();
  const facts = [
    [found.less.toPrecision(3) + "×", w("n.less")],
    [percent(map.total ? map.empty / map.total : 0), w("n.skipped")],
    found.predicted === null ? [seconds(found.schedules.plan.seconds), w("n.least")] : [seconds(found.predicted), w("n.time")],
  ];
  const kind = found.by === "model" ? "runs.model" : found.tile === found.runs ? "runs.it" : found.refused ? "runs.refused" : "runs.yours";
  const passes = Object.entries(found.passes).map(([pass, tile]) => pass + " " + tile).join(", ");
  $("runs").textContent = w(kind, found) + (passes && !found.refused ? " " + w("runs.all", { passes }) : "");
  if (found.binding) facts.push([w("r." + found.binding), w("n.binding")]);
  else facts.push([bytes(Object.values(found.onChip).reduce((a, b) => a + b, 0)), w("f.sram_bytes")]);
  $("numbers").replaceChildren(...facts.map(([value, words]) => { const box = element("div"); box.append(element("b", value), element("span", words)); return box; }));
}

function showRoofline() {
  const found = chosen(), device = R.devices[state.device], peak = device.flops, bandwidth = device.dramBandwidth;
  $("roofline-p").textContent = w("roofline.p");
  const points = WAYS.map((way) => found.schedules[way]);
  const low = Math.min(...points.map((p) => p.intensity), peak / bandwidth) / 4, high = Math.max(...points.map((p) => p.intensity), peak / bandwidth) * 4;
  const spread = [...points.map((p) => p.rate), peak, low * bandwidth];
  const roof = (p, b, name, dash) => ({ x: [low, p / b, high], y: [low * b, p, p], mode: "lines", name, line: { color: css(dash ? "slate" : "ink"), width: 2, dash }, hovertemplate: "%{x:.3g} FLOP/B<br>%{y:.3s}FLOP/s<extra></extra>" });
  const traces = [roof(peak, bandwidth, w(state.device === "here" ? "roof.measured" : "roof"))];
  const m = state.device === "here" ? device.measured : null;
  if (m) traces.push(roof(device.theory.flops, device.theory.bandwidth, w("roof.theory"), "dot"));
  WAYS.forEach((way, i) => traces.push({ x: [points[i].intensity], y: [points[i].rate], mode: "markers", name: w("s." + way), marker: { color: css(COLOURS[way]), size: way === "plan" ? 17 : 13, symbol: way === "plan" ? "star" : "circle", line: { color: css("paper"), width: 1.5 } },
    hovertemplate: w("s." + way) + "<br>%{x:.4g} FLOP/B<br>" + flops(points[i].rate) + "<br>" + bytes(points[i].total) + "<br>" + seconds(points[i].seconds) + "<extra></extra>" }));
  draw("roofline", traces, { xaxis: { type: "log", title: w("intensity"), dtick: 1 }, yaxis: { type: "log", title: w("speed"), tickformat: "~s", dtick: 1, range: [Math.floor(Math.log10(Math.min(...spread))), Math.log10(Math.max(...spread, m ? device.theory.flops : 0)) + 0.25] } });
  $("reasons").replaceChildren(...found.reasons.map((reason) => element("li", reason)));
  document.querySelector(".why").hidden = !found.reasons.length;
}

function showTraffic() {
  const found = chosen(), log = $("log").checked;
  $("traffic-p").textContent = w("traffic.p");
  const names = [];
  for (const way of WAYS) for (const name of Object.keys(found.schedules[way].bytes)) if (!names.includes(name)) names.push(name);
  const labels = WAYS.map((way) => w("s." + way).replace(/[:：] ?/, ":<br>"));
  // stacked bars cannot be logarithmic: there each bar is the total, and its hover text names the tensors
  const traces = log
    ? [{ type: "bar", x: labels, y: WAYS.map((way) => found.schedules[way].total), marker: { color: WAYS.map((way) => css(COLOURS[way])) }, text: WAYS.map((way) => bytes(found.schedules[way].total)), textposition: "inside", insidetextanchor: "end", textangle: 0, textfont: { color: css("paper"), size: narrow() ? 11 : 14 }, showlegend: false,
        hovertext: WAYS.map((way) => Object.entries(found.schedules[way].bytes).map(([t, [r, x]]) => t + " " + bytes(r + x)).join("<br>")), hovertemplate: "%{x}<br>%{hovertext}<extra></extra>" }]
    : names.map((name) => ({ type: "bar", name, x: labels, y: WAYS.map((way) => (found.schedules[way].bytes[name] || [0, 0]).reduce((a, b) => a + b, 0)), marker: { color: css(TENSORS[name] || "slate") },
        hovertext: WAYS.map((way) => bytes((found.schedules[way].bytes[name] || [0, 0]).reduce((a, b) => a + b, 0))), hovertemplate: name + ": %{hovertext}<extra></extra>" }));
  const floor = found.compulsory;
  const top = Math.max(...WAYS.map((way) => found.schedules[way].total));
  draw("traffic", traces, { barmode: "stack", xaxis: { tickangle: 0, showgrid: false, tickfont: { size: narrow() ? 11 : 13, color: css("dim") } }, yaxis: log ? { type: "log", title: w("bytes"), range: [Math.log10(floor / 4), Math.log10(top * 1.6)], exponentformat: "SI", dtick: 1 } : { title: w("bytes"), exponentformat: "SI" },
    shapes: [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: floor, y1: floor, line: { color: css("dim"), dash: "dot", width: 1.5 } }],
    annotations: [{ xref: "paper", x: 1, xanchor: "right", yanchor: "bottom", y: log ? Math.log10(floor) : floor, text: w("traffic.compulsory") + ", " + bytes(floor), showarrow: false, font: { color: css("ink"), size: 12 }, bgcolor: css("paper"), opacity: 0.9, borderpad: 2, yshift: 3 }] });
  draw("shares", names.map((name) => ({ type: "bar", orientation: "h", name, y: labels, x: WAYS.map((way) => { const p = found.schedules[way]; return (100 * (p.bytes[name] || [0, 0]).reduce((a, b) => a + b, 0)) / p.total; }), marker: { color: css(TENSORS[name] || "slate") },
    hovertext: WAYS.map((way) => { const [r, x] = found.schedules[way].bytes[name] || [0, 0]; return w("traffic.read") + " " + bytes(r) + ", " + w("traffic.written") + " " + bytes(x); }), hovertemplate: name + ": %{hovertext}<extra></extra>" })),
    { barmode: "stack", bargap: 0.35, xaxis: { ticksuffix: "%", range: [0, 100], showgrid: false }, yaxis: { autorange: "reversed", showgrid: false }, legend: { orientation: "h", y: -0.15, traceorder: "normal" } });
  showCounted();
}

function showCounted() {
  const box = $("counted"), record = R.records.traffic[0];
  box.replaceChildren();
  if (!record) { box.append(prose("p", w("traffic.none"), "note")); return; }
  box.append(element("table", undefined, { id: "countedTable" }));
  const about = (c) => [count(c.seqlen), "d " + c.head_dim, c.heads === c.kv_heads ? "" : c.heads + "/" + c.kv_heads, c.mask].filter(Boolean).join(", ");
  const rows = record.kernels.flatMap((k) => k.levels.map((l) => [about(k.case), k.name, l.level, n(bytes(l.measured)), n(bytes(l.predicted)), n((l.measured / l.predicted).toFixed(3))]));
  fillTable("countedTable", w("traffic.measured") + ": " + record.device + ", " + record.date.slice(0, 10), [w("problem"), w("kernel"), w("where"), n(w("measured")), n(w("predicted")), n(w("ratio"))], rows);
}

function tileRows() { return R.maps[[state.length, state.mask, chosen().tile].join("|")]; }
function unrolled(runs) { const row = []; for (let i = 0; i < runs.length; i += 2) for (let k = 0; k < runs[i + 1]; k++) row.push(runs[i]); return row; }
function tileCounts() {
  const sums = [0, 0, 0];
  for (const runs of tileRows()) for (let i = 0; i < runs.length; i += 2) sums[runs[i]] += runs[i + 1];
  return { empty: sums[0], partial: sums[1], full: sums[2], total: sums[0] + sums[1] + sums[2] };
}
function showMap() {
  const rows = tileRows().map(unrolled), counts = tileCounts(), names = [w("empty"), w("partial"), w("full")];
  $("map-p").textContent = w("map.p", { visited: count(counts.partial + counts.full), total: count(counts.total), partial: count(counts.partial) });
  const gap = rows.length <= 40 ? 2 : rows.length <= 70 ? 1 : 0;
  const colours = [css("empty"), css("partial"), css("full")];
  $("mapKey").replaceChildren(...names.map((name, i) => { const key = element("span", name); const swatch = element("i"); swatch.style.background = colours[i]; key.prepend(swatch); return key; }));
  const scale = colours.flatMap((colour, i) => [[i / 3, colour], [(i + 1) / 3, colour]]);
  draw("map", [{ type: "heatmap", z: rows, zmin: -0.5, zmax: 2.5, colorscale: scale, xgap: gap, ygap: gap, text: rows.map((row) => row.map((c) => names[c])), hovertemplate: w("queries") + " %{y}, " + w("keys") + " %{x}: %{text}<extra></extra>", showscale: false }],
    { xaxis: { title: w("keys"), side: "top", showgrid: false, constrain: "domain", zeroline: false }, yaxis: { title: w("queries"), autorange: "reversed", showgrid: false, scaleanchor: "x", scaleratio: rows.length ? rows[0].length / rows.length : 1, constrain: "domain", zeroline: false } });
}

function showTimeline() {
  const runs = R.timelines[[state.device, state.dim, chosen().tile].join("|")];
  const gain = w("timeline.gain", { share: percent(runs[1].total / runs[0].total) });
  $("timeline-p").textContent = w("timeline.p", { gain });
  const traces = [], order = [];
  for (const run of runs) {
    const title = run.stages === 1 ? w("buffer1") : w("buffers", { n: run.stages });
    for (const kind of ["load", "compute"]) {
      const lane = title + " · " + w(kind), events = run.events.filter((e) => e[1] === kind);
      order.push(lane);
      traces.push({ type: "bar", orientation: "h", y: events.map(() => lane), base: events.map((e) => e[3] * 1e6), x: events.map((e) => (e[4] - e[3]) * 1e6), text: events.map((e) => (kind === "load" ? "" : String(e[2] + 1))), textposition: "inside", insidetextanchor: "middle", textangle: 0,
        marker: { color: events.map((e) => css(kind === "load" ? ["teal", "green", "slate"][e[0]] : ["blue", "violet", "pink"][e[0]])), line: { color: css("paper"), width: 1 } }, textfont: { color: css("paper") }, showlegend: false,
        hovertemplate: lane + "<br>%{base:.3g} – " + "%{x:.3g} µs<extra></extra>" });
    }
  }
  draw("timeline", traces, { barmode: "overlay", bargap: 0.25, xaxis: { title: "µs" }, yaxis: { categoryorder: "array", categoryarray: order.reverse(), showgrid: false } });
}

function showMemory() {
  const m = R.memory[state.dim];
  $("memory-p").textContent = w("memory.p");
  const traces = ["standard", "io", "v1", "v2"].map((way) => ({ x: m.length, y: m[way], mode: "lines+markers", name: way === "io" ? w("memory.io") : w("s." + way), line: { color: css(way === "io" ? "slate" : COLOURS[way]), width: 2.5, dash: way === "io" ? "dot" : undefined },
    hovertext: m[way].map(bytes), hovertemplate: "%{x} · %{hovertext}" }));
  const ticks = [1024, 1048576, 1073741824, 1099511627776];
  draw("memory", traces, { xaxis: { type: "log", title: w("tokens"), tickvals: m.length.filter((_, i) => i % (narrow() ? 3 : 2) === 0), ticktext: m.length.filter((_, i) => i % (narrow() ? 3 : 2) === 0).map((v) => (v >= 1048576 ? v / 1048576 + "M" : v >= 1024 ? v / 1024 + "k" : v)) }, yaxis: { type: "log", tickvals: ticks, ticktext: ticks.map(bytes) } });
}

function showPrecision() {
  $("precision-p").textContent = w("precision.p");
  const colours = ["blue", "violet", "teal", "green", "slate", "amber", "red"], traces = [];
  [...new Set(R.precision.map((r) => r.path))].forEach((path, i) => {
    const found = R.precision.filter((r) => r.path === path && r.data === state.data), colour = css(colours[i % colours.length]);
    const line = (key, dash) => ({ x: found.map((r) => r.width), y: found.map((r) => r[key] || null), mode: dash ? "lines" : "lines+markers", name: path, legendgroup: path, showlegend: !dash, line: { color: colour, width: dash ? 1.3 : 2.2, dash },
      text: found.map((r) => r.rescalings.toPrecision(3)), hovertemplate: path + "<br>%{y:.2e}, α < 1: %{text}×<extra></extra>" });
    traces.push(line("relative"), line("relative_without", "dot"));
  });
  draw("precision", traces, { xaxis: { type: "log", title: w("width"), tickvals: [8, 16, 32, 64, 128, 256, 512, 1024] }, yaxis: { type: "log", title: w("error"), exponentformat: "power", dtick: 2 } });
}

function wrapped(text, width) {
  const lines = [""];
  for (const word of text.split(" ")) { if ((lines[lines.length - 1] + word).length > width) lines.push(""); lines[lines.length - 1] += word + " "; }
  return lines.map((line) => line.trim()).join("<br>");
}
function showBench() {
  const records = R.records.bench;
  $("bench-p").replaceChildren(...prose("p", w(records.length ? "bench.p" : "bench.none")).childNodes);
  $("bench").classList.toggle("off", !records.length);
  $("benchPick").hidden = !records.length;
  if (!records.length) return;
  const found = records[Number(state.record)], names = [...new Set(found.cases.flatMap((c) => Object.keys(c.times)))];
  const colours = ["blue", "amber", "teal", "violet", "slate", "pink", "green"], labels = found.cases.map((c) => wrapped(c.words, narrow() ? 22 : 46));
  const traces = names.map((name, i) => {
    const times = found.cases.map((c) => c.times[name]);
    return { mode: "markers", name, y: labels, x: times.map((t) => (t ? t.p50 * 1e3 : null)), marker: { color: css(colours[i % colours.length]), size: 12, symbol: ["circle", "diamond", "square", "cross", "triangle-up"][i % 5] }, hovertext: times.map((t) => (t ? seconds(t.p50) : "")), hovertemplate: name + ": %{hovertext}<extra></extra>",
      error_x: { type: "data", symmetric: false, array: times.map((t) => (t ? (t.p80 - t.p50) * 1e3 : 0)), arrayminus: times.map((t) => (t ? (t.p50 - t.p20) * 1e3 : 0)), color: css(colours[i % colours.length]), thickness: 2 } };
  });
  $("bench").style.height = Math.max(220, 110 + found.cases.length * (narrow() ? 66 : 46)) + "px";
  draw("bench", traces, { xaxis: { type: "log", title: w("time") + " (ms)", tickangle: 0, nticks: narrow() ? 4 : 8 }, yaxis: { autorange: "reversed", type: "category", tickfont: { size: narrow() ? 10.5 : 12, color: css("ink") } }, legend: { orientation: "h", y: 1.02, yanchor: "bottom" }, margin: { t: 40, l: 10, r: 14, b: 20 } });
}

function showCertificate() {
  const c = R.run.certificate, e = R.run.explanation, box = $("certificate");
  $("certificate-p").textContent = w("certificate.p", { call: R.run.call, tokens: count(e.problem.seqlen_q), heads: e.problem.heads, backend: e.backend });
  const lines = [w("c.rows", { checked: count(c.checked), rows: count(c.rows), used: percent(c.used, 1) }), w("c.detection", { one: percent(c.detection_of_one_row, 2), many: count(c.resolution_99) }), c.stray ? w("c.stray", { stray: count(c.stray) }) : w("c.screen", { elements: count(c.elements) })];
  box.replaceChildren(element("span", (c.ok ? "✓ " : "✗ ") + w(c.ok ? "c.ok" : "c.bad"), { class: c.ok ? "verdict" : "verdict bad" }), ...lines.map((line) => element("p", line)));
  fillTable("worst", w("c.worst"), [w("c.where"), n(w("c.value")), n(w("c.exact")), n(w("c.bound")), n(w("c.used"))], c.worst.map((r) => [r.what + " " + r.head + ", " + r.row, n(r.actual.toPrecision(6)), n(r.exact.toPrecision(6)), n(r.bound.toExponential(1)), n(percent(r.used, 1))]));
  const m = e.measured, parts = [["ideal", m.ideal], ...Object.entries(m.losses)].filter(([, s], i) => i === 0 || s > 0.002 * m.seconds).reverse();
  $("lossWords").textContent = w("losses.p", { time: seconds(m.seconds), share: percent(m.of_ceiling) });
  draw("losses", [{ type: "bar", orientation: "h", y: parts.map(([name]) => w("l." + name)), x: parts.map(([, s]) => (100 * s) / m.seconds), text: parts.map(([, s]) => seconds(s)), textposition: "auto", marker: { color: parts.map(([name]) => css(name === "ideal" ? "good" : "red")) }, hovertemplate: "%{y}: %{text}<extra></extra>" }], { xaxis: { ticksuffix: "%", range: [0, 100] }, yaxis: { showgrid: false } });
  const rows = Object.entries(e.backends).map(([name, b]) => { const row = [b.chosen ? "✓" : b.serves ? "·" : "✗", name, { text: b.chosen ? w("chosen") : b.reasons.join("; "), kind: b.chosen ? "" : "s" }]; row.chosen = b.chosen; return row; });
  fillTable("backends", "", null, rows);
}

function show() {
  showMachine(); showNumbers(); showRoofline(); showTraffic(); showMap(); showWalk(); showTimeline(); showParallel(); showMemory(); showPrecision(); showBench(); showCertificate();
}
