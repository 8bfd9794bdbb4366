"use strict";
// The walk over the tiles, the switches, and the start of the page.
const walk = { at: 0, timer: 0 };
const walkNow = () => R.walks[state.mask + "|" + state.schedule];
const tileOf = (row) => Math.floor(Number(row) / R.walkTile);

function gridOf(steps, now) {
  const side = 96 / R.walkTile, grid = $("grid"), kinds = {}, order = {};
  steps.forEach(([i, j, kind], k) => { kinds[i + "," + j] = kind; order[i + "," + j] = k; });
  grid.style.gridTemplateColumns = "repeat(" + side + ", 1fr)";
  const cells = [];
  for (let i = 0; i < side; i++) for (let j = 0; j < side; j++) {
    const key = i + "," + j, cell = element("i");
    if (kinds[key]) cell.classList.add(kinds[key] === 1 ? "p" : "f");
    if (order[key] <= now) cell.classList.add("seen");
    if (order[key] === now) cell.classList.add("now");
    if (i === tileOf(state.row)) cell.classList.add("mine");
    cells.push(cell);
  }
  grid.replaceChildren(...cells);
  const [i, j, kind] = steps[now];
  grid.setAttribute("aria-label", w("queries") + " " + i + ", " + w("keys") + " " + j + ": " + w(kind === 1 ? "partial" : "full"));
}

function formula(parts) {
  const line = element("div", undefined, { class: "formula" });
  for (const part of parts) line.append(Array.isArray(part) ? element(part[1] === "a" ? "span" : "b", part[0], part[1] === "a" ? { class: "a" } : {}) : document.createTextNode(part));
  return line;
}
const short = (x) => (x === 0 ? "0" : Math.abs(x) >= 1e-3 ? x.toFixed(3) : x.toExponential(1));

function stateOf(now) {
  const { steps, rows } = walkNow(), row = state.row, states = rows[row], box = $("state");
  const [i, j] = steps[now], mine = tileOf(row), k = states.findIndex((s) => s.j === j);
  const seen = states.filter((s) => steps.slice(0, now + 1).some(([a, b]) => a === mine && b === s.j)).length;
  const parts = [];
  if (i !== mine || k < 0) {
    const done = seen === states.length && seen > 0, where = w(state.schedule === "v1" ? "walk.memory" : "walk.registers");
    const key = i === mine ? "walk.none" : !seen ? "walk.before" : done && state.schedule === "v2" ? "walk.done" : "walk.waits";
    parts.push(element("p", w(key, { row, where })));
    if (seen) { const s = states[seen - 1]; parts.push(formula(["m = ", [short(s.m)], "   l = ", [short(s.l)], "   o₀ = ", [short(s.o)]])); }
  } else {
    const s = states[k], before = k ? states[k - 1] : null;
    parts.push(element("p", w(!before ? "walk.first" : s.alpha < 1 ? "walk.grew" : "walk.kept")));
    parts.push(formula(["m = max(", before ? short(before.m) : "−∞", ", ", short(s.tileMax), ") = ", [short(s.m)]]));
    parts.push(formula(["α = exp(", before ? short(before.m) : "−∞", " − ", short(s.m), ") = ", [short(s.alpha), "a"]]));
    const added = s.l - (before ? s.alpha * before.l : 0), o = s.o - (before ? s.alpha * before.o : 0);
    parts.push(formula(["l = ", [short(s.alpha), "a"], " · ", before ? short(before.l) : "0", " + ", short(added), " = ", [short(s.l)]]));
    parts.push(formula(["o₀ = ", [short(s.alpha), "a"], " · ", before ? short(before.o) : "0", " + ", short(o), " = ", [short(s.o)]]));
    const scores = s.scores.filter((x) => x !== null), low = Math.min(...scores) - 0.3, high = Math.max(...scores);
    const bars = element("div", undefined, { class: "scores", role: "img", "aria-label": w("walk.scores") });
    for (const x of s.scores) { const bar = element("i"); if (x === null) bar.className = "off"; else { bar.style.height = (100 * (x - low)) / (high - low) + "%"; if (x === high) bar.className = "top"; } bars.append(bar); }
    parts.push(element("p", w("walk.scores"), { class: "note" }), bars);
  }
  box.replaceChildren(...parts);
  rowChart(states, seen);
}

function rowChart(states, seen) {
  const known = states.slice(0, seen), top = (key) => 1.12 * Math.max(...states.map((s) => Math.abs(s[key])));
  const line = (key, name, colour, axis) => ({ x: known.map((s) => s.j), y: known.map((s) => s[key]), name, mode: "lines+markers", yaxis: axis, line: { color: css(colour), width: 2 }, marker: { size: 9, color: css(colour) }, hovertemplate: name + " %{y:.4g}<extra></extra>" });
  const low = Math.min(0, ...states.map((s) => 1.2 * s.out)), lowest = Math.min(0, ...states.map((s) => 1.2 * s.m));
  draw("rowchart", [line("m", "m", "blue", "y"), line("l", "l", "teal", "y"), line("alpha", "α", "amber", "y2"), line("out", "o₀ / l", "violet", "y2")],
    { xaxis: { title: w("keys"), dtick: 1, range: [-0.3, 96 / R.walkTile - 0.7] }, yaxis: { title: "m, l", range: [lowest, Math.max(top("m"), top("l"))] }, yaxis2: { title: "α, o₀ / l", overlaying: "y", side: "right", showgrid: false, tickmode: "auto", nticks: 5, range: [low, Math.max(1.15, top("out"))] }, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 }, margin: { l: 16, r: 16, t: 34, b: 16 } });
}

function showWalk() {
  $("walk-p").textContent = w("walk.p");
  const { steps, bytes: moved, rows } = walkNow();
  const choices = Object.keys(rows).sort((a, b) => a - b);
  if (!choices.includes(state.row)) state.row = choices[1];
  $("row").replaceChildren(...choices.map((row) => element("option", row, { value: row })));
  $("row").value = state.row;
  walk.at = Math.min(walk.at, steps.length - 1);
  $("step").max = steps.length - 1;
  $("step").value = walk.at;
  $("step").setAttribute("aria-valuetext", w("step", { step: walk.at + 1, steps: steps.length }));
  $("stepWords").textContent = w("step", { step: walk.at + 1, steps: steps.length });
  gridOf(steps, walk.at);
  stateOf(walk.at);
  const other = R.walks[state.mask + "|" + (state.schedule === "v1" ? "v2" : "v1")], most = Math.max(moved[moved.length - 1], other.bytes[other.bytes.length - 1]);
  $("moved").style.width = (100 * moved[walk.at]) / most + "%";
  $("movedWords").textContent = w("walk.moved", { bytes: bytes(moved[walk.at]), total: bytes(moved[moved.length - 1]) });
  $("play").textContent = w(walk.timer ? "pause" : "play");
  conclude("rowchart", state.mask + "|" + state.row);
}
function begin() {
  // where the row that is watched is first rescaled, or at least first met
  const { steps, rows } = walkNow(), states = rows[state.row] || [], mine = tileOf(state.row);
  const first = states.find((s, k) => k && s.alpha < 1) || states[0];
  walk.at = first ? Math.max(0, steps.findIndex(([i, j]) => i === mine && j === first.j)) : 0;
}
function go(step) { walk.at = Math.max(0, Math.min(walkNow().steps.length - 1, step)); showWalk(); }
function stop() { clearInterval(walk.timer); walk.timer = 0; }
function play() {
  if (walk.timer) { stop(); showWalk(); return; }
  if (walk.at === walkNow().steps.length - 1) walk.at = 0;
  walk.timer = setInterval(() => { if (walk.at >= walkNow().steps.length - 1) stop(); else walk.at++; showWalk(); }, 700);
  showWalk();
}

function show() {
  showMachine(); showNumbers(); showRoofline(); showTraffic(); showMap(); showWalk(); showBudget(); showBanks(); showTimeline(); showParallel(); showMemory(); showPrecision(); showBench(); showCertificate();
}
function speak() {
  document.documentElement.lang = state.language === "zh" ? "zh-CN" : "en";
  document.title = "tilewise · " + w("title");
  for (const node of document.querySelectorAll("[data-w]")) node.textContent = w(node.dataset.w);
  for (const node of document.querySelectorAll("[data-t]")) { node.title = w(node.dataset.t); node.setAttribute("aria-label", w(node.dataset.t)); }
  $("step").setAttribute("aria-label", w("walk.h"));
  $("subtitle").textContent = w("subtitle", { machine: R.devices.here.name, gpu: R.devices[R.axes.device[0]].name });
  const named = { device: (v) => (v === "here" ? w("device.here", { name: R.devices.here.name }) : R.devices[v].name), mask: (v) => w("mask." + v), length: (v) => count(Number(v)), tile: (v) => (v === "plan" ? w("tile.plan") : v.replace("x", " × ")), schedule: (v) => w("s." + v), data: (v) => w("data." + v), access: (v) => w("access." + v) };
  for (const [name, words] of Object.entries(named)) for (const option of $(name).options) option.textContent = words(option.value);
  $("record").replaceChildren(...R.records.bench.map((r, i) => element("option", t(r.suite) + ", " + r.where + ", " + r.date.slice(0, 10), { value: i })));
  const v = R.versions;
  $("made").textContent = w("made", { date: R.date, version: v.tilewise, software: ["python", "torch", "triton"].filter((name) => v[name]).map((name) => name + " " + v[name]).join(", ") });
}
const dark = window.matchMedia("(prefers-color-scheme: dark)");
function dress() { document.documentElement.dataset.theme = state.theme === "auto" ? (dark.matches ? "dark" : "light") : state.theme; }

function start() {
  dress();
  for (const name of ["device", "length", "dim", "mask", "tile", "schedule", "row", "data", "record", "access", "language", "theme"])
    $(name).addEventListener("change", () => {
      state[name] = $(name).value;
      if (name === "mask" || name === "schedule" || name === "row") { stop(); begin(); }
      if (name === "theme") dress();
      if (name === "language") speak();
      show();
    });
  dark.addEventListener("change", () => { dress(); show(); });
  $("log").addEventListener("change", showTraffic);
  $("controls").addEventListener("submit", (event) => event.preventDefault());
  $("back").addEventListener("click", () => { stop(); go(walk.at - 1); });
  $("forth").addEventListener("click", () => { stop(); go(walk.at + 1); });
  $("play").addEventListener("click", play);
  $("step").addEventListener("input", () => { stop(); go(Number($("step").value)); });
  let wide = narrow();
  window.addEventListener("resize", () => { if (narrow() !== wide) { wide = narrow(); show(); } });
  speak();
  for (const name of ["device", "length", "dim", "mask", "tile", "schedule", "data", "access", "language", "theme"]) $(name).value = state[name];
  state.row = Object.keys(walkNow().rows)[1];
  begin();
  show();
  document.documentElement.dataset.ready = "yes";
}
start();
