"use strict";
// Context parallelism: which rank computes which tile, and when.
const RANK_COLOURS = ["blue", "teal", "amber", "red", "violet", "green", "pink", "slate"];

function showParallel() {
  const p = R.parallel, found = p.masks[state.mask], name = (i) => w("parallel.rank", { n: i });
  const planned = found.schedules[found.schedules.length - 1], gathered = found.schedules.find((s) => s.name === "all-gather");
  const ours = planned.bytes_forward + planned.bytes_backward, theirs = gathered.bytes_forward + gathered.bytes_backward;
  const less = ours === 0 ? w("parallel.nothing") : w("parallel.less", { times: (theirs / ours).toPrecision(3) });
  $("parallel-p").textContent = w("parallel.p", { tokens: count(p.length), ranks: p.ranks, less });
  const colours = [css("empty"), ...RANK_COLOURS.map(css)], steps = colours.length;
  const scale = colours.flatMap((colour, i) => [[i / steps, colour], [(i + 1) / steps, colour]]);
  draw("parallelTiles", [{ type: "heatmap", z: found.tiles, zmin: -1.5, zmax: steps - 1.5, colorscale: scale, xgap: 1, ygap: 1, showscale: false,
    text: found.tiles.map((row) => row.map((rank) => (rank < 0 ? w("empty") : name(rank)))), hovertemplate: w("queries") + " %{y}, " + w("keys") + " %{x}: %{text}<extra></extra>" }],
    { xaxis: { title: w("keys"), side: "top", showgrid: false, constrain: "domain", zeroline: false }, yaxis: { title: w("queries"), autorange: "reversed", showgrid: false, scaleanchor: "x", constrain: "domain", zeroline: false } });
  const lanes = [], traces = [], does = { compute: w("parallel.compute"), receive: w("parallel.receive"), return: w("parallel.return") };
  for (let rank = 0; rank < p.ranks; rank++) for (const kind of ["compute", "receive", "return"]) {
    const own = found.events.filter((e) => e[0] === rank && e[1] === kind), lane = name(rank) + (kind === "compute" ? "" : " ⇄");
    if (!lanes.includes(lane)) lanes.push(lane);
    if (!own.length) continue;
    traces.push({ type: "bar", orientation: "h", y: own.map(() => lane), base: own.map((e) => e[3] * 1e6), x: own.map((e) => (e[4] - e[3]) * 1e6), showlegend: false,
      marker: { color: css(kind === "compute" ? RANK_COLOURS[rank % RANK_COLOURS.length] : "dim"), opacity: own.map((e) => (e[2] % 2 ? 0.7 : 1)), line: { color: css("paper"), width: 1 } },
      hovertext: own.map((e) => does[kind] + " " + (e[2] + 1) + ": " + seconds(e[4] - e[3])), hovertemplate: lane + "<br>%{hovertext}<extra></extra>" });
  }
  draw("parallelTime", traces, { barmode: "overlay", bargap: 0.2, xaxis: { title: "µs" }, yaxis: { categoryorder: "array", categoryarray: lanes.reverse(), showgrid: false, tickfont: { size: 11, color: css("dim") } } });
  const rows = found.schedules.map((s) => (s.seconds === null ? [w("way." + s.name), n("–"), n("–"), n("–"), n("–"), n("–"), t(s.note)]
    : [w("way." + s.name), n(bytes(s.bytes_forward)), n(bytes(s.bytes_backward)), n(percent(s.imbalance, 1)), n(seconds(s.seconds)), n(seconds(s.exposed_seconds)), t(s.note)]));
  conclude("parallelTiles", state.mask);
  conclude("parallelTime", state.mask);
  const least = Math.min(...found.schedules.filter((s) => s.seconds !== null).map((s) => s.seconds));
  found.schedules.forEach((s, i) => { rows[i].chosen = s.seconds === least; });
  fillTable("parallelTable", w("parallel.table"), [w("parallel.schedule"), n(w("parallel.forward")), n(w("parallel.backward")), n(w("parallel.imbalance")), n(w("predicted")), n(w("parallel.exposed")), ""], rows);
}
