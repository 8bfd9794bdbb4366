"use strict";
// The form of the playground: read it, compute, draw. Everything happens here, as you type; nothing is asked of any host.
(() => {
  const root = document.getElementById("pg"), language = root.dataset.language;
  const $ = (name) => document.getElementById("pg-" + name);
  const say = (key, values) => TileWords.say(key, language, values);
  const presets = JSON.parse($("presets").textContent);
  const LIMITS = { queries: [1, 131072], keys: [1, 131072], blockQ: [1, 4096], blockK: [1, 4096], headDim: [1, 512], batch: [1, 256], heads: [1, 256], kvHeads: [1, 256] };
  const MOST_TILES = 2 ** 20, MOST_HEADS = 4096; // so that every count is an exact integer, and quick
  const KINDS = ["EMPTY", "PARTIAL", "FULL"];
  let shown = null; // what was computed last

  const count = (n) => n.toLocaleString("en-US");
  function scaled(value, units, step) {
    let i = 0;
    while (value >= step && i < units.length - 1) { value /= step; i++; }
    return (i && value < 100 ? value.toPrecision(3) : value.toFixed(0)) + " " + units[i];
  }
  const bytes = (n) => scaled(n, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"], 1024);
  const flops = (n) => scaled(n, ["", "k", "M", "G", "T", "P"], 1000).trim();
  const percent = (x) => (100 * x).toFixed(x > 0 && x < 0.01 ? 2 : 1) + "%";
  function element(tag, text, kind) {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (kind) made.className = kind;
    return made;
  }
  function line(tag, cells) {
    const row = element("tr");
    cells.forEach((cell, i) => row.append(cell instanceof Node ? cell : element(tag, cell, i ? "n" : "")));
    return row;
  }

  // -- reading the form

  function problemOf() {
    const problem = { dtype: $("dtype").value }, wrong = [];
    for (const [name, [least, most]] of Object.entries(LIMITS)) {
      const field = $(name), value = Number(field.value), fine = field.value.trim() !== "" && Number.isInteger(value) && value >= least && value <= most;
      field.setAttribute("aria-invalid", String(!fine));
      problem[name] = value;
      if (!fine) wrong.push(say("range", { name: field.parentElement.firstChild.textContent, least: count(least), most: count(most) }));
    }
    if (!wrong.length && problem.heads % problem.kvHeads) wrong.push(say("multiple", problem));
    if (!wrong.length && problem.batch * problem.heads > MOST_HEADS) wrong.push(say("heads-many", { most: count(MOST_HEADS) }));
    const tiles = TileModel.ceil(problem.queries, problem.blockQ) * TileModel.ceil(problem.keys, problem.blockK);
    if (!wrong.length && tiles > MOST_TILES) wrong.push(say("sizes", { tiles: count(tiles), most: count(MOST_TILES) }));
    return { problem, wrong };
  }

  function complain(text, at) {
    const box = $("error"), parts = [document.createTextNode(text)];
    if (at !== undefined) parts.unshift(element("span", $("mask").value + "\n" + " ".repeat(at) + "^", "pg-text"));
    box.replaceChildren(...parts);
    box.hidden = !text;
    root.classList.toggle("pg-bad", Boolean(text));
  }

  function update(byHand) {
    const { problem, wrong } = problemOf(), text = $("mask").value;
    $("mask").setAttribute("aria-invalid", "false");
    if (wrong.length) { complain(wrong.join("\n")); return; }
    try {
      shown = { ...TileModel.evaluate(text, problem), problem, text };
    } catch (error) {
      if (!(error instanceof MaskText.MaskError)) throw error;
      $("mask").setAttribute("aria-invalid", "true");
      complain(TileWords.error(error, language), error.got || error.key !== "terms" ? error.at : undefined);
      return;
    }
    complain("");
    chooseSequence();
    const known = presets.findIndex((one) => ["blockQ", "blockK", "headDim", "dtype"].every((name) => one[name] === problem[name]));
    $("preset").value = String(known);
    show();
    if (byHand) remember(problem, text);
  }

  // -- showing

  function chooseSequence() {
    const many = shown.tiles.length, select = $("b"), at = Math.min(Number(select.value) || 0, many - 1);
    select.replaceChildren(...shown.tiles.map((_, b) => { const option = element("option", String(b)); option.value = b; return option; }));
    select.value = at;
    $("which").hidden = many < 2;
  }

  // Places of several tiles each, where there are more tiles than pixels: EMPTY or FULL if all of them are, else PARTIAL.
  function reduced({ rows, cols, classes }, most) {
    const share = Math.ceil(Math.max(rows, cols) / most), high = Math.ceil(rows / share), wide = Math.ceil(cols / share);
    if (share === 1) return { share, high, wide, places: classes };
    const least = new Uint8Array(high * wide).fill(2), greatest = new Uint8Array(high * wide);
    for (let i = 0; i < rows; i++) for (let j = 0; j < cols; j++) {
      const at = Math.floor(i / share) * wide + Math.floor(j / share), kind = classes[i * cols + j];
      if (kind < least[at]) least[at] = kind;
      if (kind > greatest[at]) greatest[at] = kind;
    }
    return { share, high, wide, places: least.map((kind, at) => (kind === greatest[at] ? kind : 1)) };
  }

  function draw() {
    const canvas = $("canvas"), { queries, keys, blockQ, blockK } = shown.problem;
    const width = canvas.clientWidth, height = Math.round(width * Math.max(0.2, Math.min(1.25, queries / keys))), ratio = window.devicePixelRatio || 1;
    canvas.style.height = height + "px";
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d"), style = getComputedStyle(document.body);
    const colour = (name) => style.getPropertyValue("--tw-" + name).trim();
    const { share, high, wide, places } = reduced(shown.tiles[Number($("b").value) || 0], Math.min(canvas.width, canvas.height, 1024));
    const x = (j) => Math.round(Math.min(1, (j * share * blockK) / keys) * canvas.width), y = (i) => Math.round(Math.min(1, (i * share * blockQ) / queries) * canvas.height);
    const cell = Math.min(canvas.width / wide, canvas.height / high);
    pen.clearRect(0, 0, canvas.width, canvas.height);
    for (let i = 0; i < high; i++) for (let j = 0; j < wide; j++) {
      const kind = places[i * wide + j], left = x(j), top = y(i), w = x(j + 1) - left, h = y(i + 1) - top;
      if (!kind) continue;
      pen.fillStyle = colour(kind === 1 ? "partial" : "full");
      pen.fillRect(left, top, w, h);
      if (kind === 1 && cell >= 10 * ratio) hatch(pen, left, top, w, h, colour("full"), ratio);
    }
    if (cell >= 5 * ratio) {
      pen.strokeStyle = colour("line");
      pen.globalAlpha = 0.45;
      pen.beginPath();
      for (let j = 1; j < wide; j++) { pen.moveTo(x(j) + 0.5, 0); pen.lineTo(x(j) + 0.5, canvas.height); }
      for (let i = 1; i < high; i++) { pen.moveTo(0, y(i) + 0.5); pen.lineTo(canvas.width, y(i) + 0.5); }
      pen.stroke();
      pen.globalAlpha = 1;
    }
    $("place").textContent = share > 1 ? say("shared") : "";
    const [empty, partial, full] = shown.counts.map(count);
    canvas.setAttribute("aria-label", say("picture", { mask: shown.text, empty, partial, full }));
  }
  function hatch(pen, left, top, w, h, ink, ratio) {
    pen.save();
    pen.beginPath();
    pen.rect(left, top, w, h);
    pen.clip();
    pen.strokeStyle = ink;
    pen.globalAlpha = 0.45;
    pen.lineWidth = ratio;
    pen.beginPath();
    for (let at = -h; at < w; at += 6 * ratio) { pen.moveTo(left + at, top + h); pen.lineTo(left + at + h, top); }
    pen.stroke();
    pen.restore();
  }

  function showNumbers() {
    const { counts, pairs, area, every, flops: work, traffic } = shown, all = counts[0] + counts[1] + counts[2];
    $("counts").replaceChildren(...KINDS.map((kind, i) => {
      const name = element("td");
      name.append(element("i", undefined, "pg-" + i), " " + kind);
      return line("td", [name, count(counts[i]), percent(counts[i] / all)]);
    }));
    const facts = [[percent(pairs / every), say("visible")], [percent(area / every), say("computed")], [percent(area ? 1 - pairs / area : 0), say("wasted")],
      [flops(work.visited), say("flops", { useful: flops(work.useful) })], [bytes(traffic.v2.total), say("moved")]];
    $("numbers").replaceChildren(...facts.flatMap(([value, words]) => [element("dt", value), element("dd", words)]));
  }

  function showTraffic() {
    const ways = Object.entries(shown.traffic).map(([name, moved]) => [name, moved.total]), most = Math.max(...ways.map(([, total]) => total));
    $("bars").replaceChildren(...ways.map(([name, total]) => {
      const box = element("div"), words = element("div", undefined, "pg-words"), bar = element("div", undefined, "pg-bar");
      words.append(element("span", say(name)), element("b", bytes(total)));
      bar.style.width = (100 * total) / most + "%";
      box.append(words, bar);
      return box;
    }));
    const { reads, writes, total } = shown.traffic.v2, names = [...new Set([...Object.keys(reads), ...Object.keys(writes)])];
    $("tensors").replaceChildren(line("th", ["v2: " + say("tensor"), say("read"), say("written")].map((text, i) => element("th", text, i ? "n" : ""))),
      ...names.map((name) => line("td", [name, name in reads ? count(reads[name]) : "–", name in writes ? count(writes[name]) : "–"])),
      line("td", [say("all"), "", count(total) + " B"]));
  }

  function show() {
    draw();
    showNumbers();
    showTraffic();
    const numpy = shown.python.includes("np.") ? "import numpy as np\n" : "", { queries, keys, blockQ, blockK } = shown.problem;
    $("python").textContent = `${numpy}import tilewise as tw\n\nmask = ${shown.python}\nmask.show(${queries}, ${keys}, tile=(${blockQ}, ${blockK}))`;
  }

  function point(event) {
    if (!shown) return;
    const canvas = $("canvas"), box = canvas.getBoundingClientRect(), { queries, keys, blockQ, blockK } = shown.problem;
    const { rows, cols, classes } = shown.tiles[Number($("b").value) || 0];
    const at = (share, length, block, tiles) => Math.max(0, Math.min(tiles - 1, Math.floor((share * length) / block)));
    const i = at((event.clientY - box.top) / box.height, queries, blockQ, rows), j = at((event.clientX - box.left) / box.width, keys, blockK, cols);
    $("place").textContent = say("place", { q0: count(i * blockQ), q1: count(Math.min(queries, (i + 1) * blockQ) - 1), k0: count(j * blockK), k1: count(Math.min(keys, (j + 1) * blockK) - 1), kind: KINDS[classes[i * cols + j]] });
  }

  // -- the address holds what is shown, so that it can be passed on

  function remember(problem, text) {
    history.replaceState(null, "", "#" + new URLSearchParams({ mask: text, ...problem }));
  }
  function recall() {
    const given = new URLSearchParams(location.hash.slice(1));
    for (const [name, value] of given.has("mask") ? given : []) if (["mask", "dtype"].includes(name) || Object.hasOwn(LIMITS, name)) $(name).value = value;
    return given.has("mask");
  }

  function choose() {
    const one = presets[Number($("preset").value)];
    if (!one) return;
    for (const name of ["blockQ", "blockK", "headDim", "dtype"]) $(name).value = one[name];
    update(true);
  }

  $("preset").append(...[{ name: say("custom") }, ...presets].map(({ name }, i) => { const option = element("option", name); option.value = i - 1; return option; }));
  for (const name of ["mask", ...Object.keys(LIMITS), "dtype"]) $(name).addEventListener("input", () => update(true));
  $("preset").addEventListener("change", choose);
  $("b").addEventListener("change", draw);
  for (const chip of root.querySelectorAll(".pg-chip")) chip.addEventListener("click", () => { $("mask").value = chip.textContent; update(true); });
  for (const kind of ["pointermove", "pointerdown"]) $("canvas").addEventListener(kind, point);
  window.addEventListener("resize", () => shown && draw());
  window.addEventListener("hashchange", () => { if (recall()) update(false); });
  new MutationObserver(() => shown && draw()).observe(document.body, { attributes: true, attributeFilter: ["data-md-color-scheme"] });
  if (!recall()) for (const [name, value] of Object.entries(presets[0])) if (name !== "name") $(name).value = value;
  update(false);
  root.dataset.ready = "yes";
})();
