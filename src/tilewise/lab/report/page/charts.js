"use strict";
// The charts of one machine and problem: roofline, traffic, tiles, buffers, memory, precision, benchmarks, a certified run.

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
  conclude("roofline", position());
  conclude("tiles", [state.device, state.length, state.dim, state.mask, "plan"].join("|"));
  $("reasons").replaceChildren(...found.reasons.map((reason) => element("li", t(reason))));
  $("whyBox").hidden = !found.reasons.length;
}

const filling = (name) => ({ color: css(TENSORS[name] || "line"), line: { color: css("paper"), width: 1 } });
function showTraffic() {
  const found = chosen(), log = $("log").checked;
  $("traffic-p").textContent = w("traffic.p");
  // tensors in one order; the numbers of each row (m, l, LSE, …) are one entry
  const held = (way) => Object.keys(found.schedules[way].bytes), group = (name) => (TENSORS[name] ? name : "statistics");
  const names = [...ORDER, "statistics"].filter((name) => WAYS.some((way) => held(way).some((one) => group(one) === name)));
  const moved = (way, name) => held(way).filter((one) => group(one) === name).map((one) => found.schedules[way].bytes[one]).reduce((a, b) => [a[0] + b[0], a[1] + b[1]], [0, 0]);
  const both = (way, name) => moved(way, name)[0] + moved(way, name)[1], shown = (name) => (name === "statistics" ? w("statistics") : name);
  const labels = WAYS.map((way) => w("s." + way).replace(/[:：] ?/, ":<br>"));
  // stacked bars cannot be logarithmic: there each bar is the total, and its hover text names the tensors
  const traces = log
    ? [{ type: "bar", x: labels, y: WAYS.map((way) => found.schedules[way].total), marker: { color: WAYS.map((way) => css(COLOURS[way])) }, text: WAYS.map((way) => bytes(found.schedules[way].total)), textposition: "inside", insidetextanchor: "end", textangle: 0, textfont: { color: css("paper"), size: narrow() ? 11 : 14 }, showlegend: false,
        hovertext: WAYS.map((way) => Object.entries(found.schedules[way].bytes).map(([t, [r, x]]) => t + " " + bytes(r + x)).join("<br>")), hovertemplate: "%{x}<br>%{hovertext}<extra></extra>" }]
    : names.map((name) => ({ type: "bar", name: shown(name), x: labels, y: WAYS.map((way) => both(way, name)), marker: filling(name), showlegend: false,
        hovertext: WAYS.map((way) => bytes(both(way, name))), hovertemplate: shown(name) + ": %{hovertext}<extra></extra>" }));
  const floor = found.compulsory;
  const top = Math.max(...WAYS.map((way) => found.schedules[way].total));
  draw("traffic", traces, { barmode: "stack", xaxis: { tickangle: 0, showgrid: false, tickfont: { size: narrow() ? 11 : 13, color: css("dim") } }, yaxis: log ? { type: "log", title: w("bytes"), range: [Math.log10(floor / 4), Math.log10(top * 1.6)], exponentformat: "SI", dtick: 1 } : { title: w("bytes"), exponentformat: "SI" },
    shapes: [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: floor, y1: floor, line: { color: css("dim"), dash: "dot", width: 1.5 } }],
    annotations: [{ xref: "paper", x: 1, xanchor: "right", yref: "paper", y: 1, yanchor: "top", text: "┄ " + w("traffic.compulsory") + (narrow() ? "<br>" : ", ") + bytes(floor), align: "right", showarrow: false, font: { color: css("ink"), size: 12 } }] });
  draw("shares", names.map((name) => ({ type: "bar", orientation: "h", name: shown(name), y: labels, x: WAYS.map((way) => (100 * both(way, name)) / found.schedules[way].total), marker: filling(name), showlegend: false,
    hovertext: WAYS.map((way) => { const [r, x] = moved(way, name); return w("traffic.read") + " " + bytes(r) + ", " + w("traffic.written") + " " + bytes(x); }), hovertemplate: shown(name) + ": %{hovertext}<extra></extra>" })),
    { barmode: "stack", bargap: 0.35, xaxis: { ticksuffix: "%", range: [0, 100], showgrid: false }, yaxis: { autorange: "reversed", showgrid: false } });
  legend("sharesKey", names.map((name) => [shown(name), TENSORS[name] || "line"]));
  conclude("traffic", position());
  conclude("shares", position());
  showCounted();
}

function showCounted() {
  const box = $("counted"), record = R.records.traffic[0];
  box.replaceChildren();
  if (!record) { box.append(prose("p", w("traffic.none"), "note")); return; }
  const levels = record.kernels.flatMap((k) => k.levels), ratios = levels.map((l) => l.measured / l.predicted);
  const summary = element("summary", w("traffic.counted", { n: record.kernels.length, low: percent(Math.min(...ratios), 1), high: percent(Math.max(...ratios), 1) })), table = element("div", undefined, { class: "scroll" });
  const fold = element("details", undefined, { id: "countedBox", class: "why" });
  table.append(element("table", undefined, { id: "countedTable" }));
  fold.append(summary, table);
  box.append(fold);
  const about = (c) => [count(c.seqlen), "d " + c.head_dim, c.heads === c.kv_heads ? "" : c.heads + "/" + c.kv_heads, t(c.mask)].filter(Boolean).join(", ");
  const rows = record.kernels.flatMap((k) => k.levels.map((l) => [about(k.case), k.name, t(l.level), n(bytes(l.measured)), n(bytes(l.predicted)), n((l.measured / l.predicted).toFixed(3))]));
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
  conclude("map", [state.length, state.mask, chosen().tile].join("|"));
}

function showTimeline() {
  const runs = R.timelines[[state.device, state.dim, chosen().tile].join("|")];
  $("timeline-p").textContent = w("timeline.p");
  conclude("timeline", [state.device, state.dim, chosen().tile].join("|"));
  const traces = [], order = [];
  for (const run of runs) {
    const title = run.stages === 1 ? w("buffer1") : w("buffers", { n: run.stages });
    for (const kind of ["load", "compute"]) {
      const lane = title + " · " + w(kind), events = run.events.filter((e) => e[1] === kind);
      order.push(lane);
      traces.push({ type: "bar", orientation: "h", y: events.map(() => lane), base: events.map((e) => e[3] * 1e6), x: events.map((e) => (e[4] - e[3]) * 1e6), text: events.map((e) => (kind === "load" ? "" : String(e[2] + 1))), textposition: "inside", insidetextanchor: "middle", textangle: 0,
        marker: { color: events.map((e) => css(kind === "load" ? ["teal", "amber", "slate"][e[0]] : ["blue", "violet", "pink"][e[0]])), line: { color: css("paper"), width: 1 } }, textfont: { color: css("paper") }, showlegend: false,
        hovertemplate: lane + "<br>%{base:.3g} – " + "%{x:.3g} µs<extra></extra>" });
    }
  }
  draw("timeline", traces, { barmode: "overlay", bargap: 0.25, xaxis: { title: "µs" }, yaxis: { categoryorder: "array", categoryarray: order.reverse(), showgrid: false } });
}

function showMemory() {
  const m = R.memory[state.dim];
  $("memory-p").textContent = w("memory.p");
  conclude("memory", state.dim);
  const traces = ["standard", "io", "v1", "v2"].map((way) => ({ x: m.length, y: m[way], mode: "lines+markers", name: way === "io" ? w("memory.io") : w("s." + way), line: { color: css(way === "io" ? "slate" : COLOURS[way]), width: 2.5, dash: way === "io" ? "dot" : undefined },
    hovertext: m[way].map(bytes), hovertemplate: "%{x} · %{hovertext}" }));
  const ticks = [1024, 1048576, 1073741824, 1099511627776];
  draw("memory", traces, { xaxis: { type: "log", title: w("tokens"), tickvals: m.length.filter((_, i) => i % (narrow() ? 3 : 2) === 0), ticktext: m.length.filter((_, i) => i % (narrow() ? 3 : 2) === 0).map((v) => (v >= 1048576 ? v / 1048576 + "M" : v >= 1024 ? v / 1024 + "k" : v)) }, yaxis: { type: "log", tickvals: ticks, ticktext: ticks.map(bytes) } });
}

function showPrecision() {
  $("precision-p").textContent = w("precision.p");
  conclude("precision", state.data);
  const colours = ["blue", "pink", "teal", "green", "slate", "amber", "red"], symbols = ["circle", "square", "diamond", "triangle-up", "cross", "x", "star"], traces = [];
  [...new Set(R.precision.map((r) => r.path))].forEach((path, i) => {
    const found = R.precision.filter((r) => r.path === path && r.data === state.data), colour = css(colours[i % colours.length]);
    const name = w("path." + path), line = (key, dash) => ({ x: found.map((r) => r.width), y: found.map((r) => r[key] || null), mode: dash ? "lines" : "lines+markers", name, legendgroup: path, showlegend: !dash, line: { color: colour, width: dash ? 1.3 : 2.2, dash }, marker: { symbol: symbols[i % symbols.length], size: 8 },
      text: found.map((r) => r.rescalings.toPrecision(3)), hovertemplate: name + "<br>%{y:.2e}, α < 1: %{text}×<extra></extra>" });
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
  conclude("bench", state.record);
  if (!records.length) return;
  const found = records[Number(state.record)], names = [...new Set(found.cases.flatMap((c) => Object.keys(c.times)))];
  const colours = ["blue", "amber", "teal", "pink", "slate", "violet", "green"], labels = found.cases.map((c) => wrapped(t(c.words), narrow() ? 22 : 46));
  const traces = names.map((name, i) => {
    const times = found.cases.map((c) => c.times[name]);
    return { mode: "markers", name: t(name), y: labels, x: times.map((t) => (t ? t.p50 * 1e3 : null)), marker: { color: css(colours[i % colours.length]), size: 12, symbol: ["circle", "diamond", "square", "cross", "triangle-up"][i % 5] }, hovertext: times.map((t) => (t ? seconds(t.p50) : "")), hovertemplate: t(name) + ": %{hovertext}<extra></extra>",
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
  conclude("losses", "");
  $("lossWords").textContent = w("losses.p", { time: seconds(m.seconds), share: percent(m.of_ceiling) });
  draw("losses", [{ type: "bar", orientation: "h", y: parts.map(([name]) => w("l." + name)), x: parts.map(([, s]) => (100 * s) / m.seconds), text: parts.map(([, s]) => seconds(s)), textposition: "auto", marker: { color: parts.map(([name]) => css(name === "ideal" ? "good" : "red")) }, hovertemplate: "%{y}: %{text}<extra></extra>" }], { xaxis: { ticksuffix: "%", range: [0, Math.max(100, (102 * m.ideal) / m.seconds)] }, yaxis: { showgrid: false } });
  const rows = Object.entries(e.backends).map(([name, b]) => { const row = [b.chosen ? "✓" : b.serves ? "·" : "✗", name, { text: b.chosen ? w("chosen") : b.reasons.map(t).join(state.language === "zh" ? "；" : "; "), kind: b.chosen ? "" : "s" }]; row.chosen = b.chosen; return row; });
  fillTable("backends", "", null, rows);
}
