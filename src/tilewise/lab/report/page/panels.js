"use strict";
// Two panels about the chip: the bytes that a plan's tiles take there, and the banks that an access to shared memory falls on.
// dK and dQ are held by different kernels
const BUFFERS = { Q: "blue", K: "teal", V: "amber", O: "violet", dO: "red", dS: "pink", dK: "green", dQ: "green", P: "slate", S: "slate" };

function showBudget() {
  const found = chosen().budget, rows = found.passes, names = [...new Set(rows.flatMap((row) => Object.keys(row.buffers)))];
  $("budget-p").textContent = w(found.frame ? "budget.frame" : "budget.p", { room: bytes(found.room) });
  conclude("budget", position());
  $("budget").classList.toggle("off", !rows.length);
  $("budgetKey").hidden = !rows.length;
  if (!rows.length) return;
  const labels = rows.map((row) => w("p." + row.pass) + "<br>" + row.tile);
  const bar = (name, size, colour) => ({ type: "bar", orientation: "h", name, y: labels, x: rows.map((row) => size(row) / 1024), showlegend: false, marker: { color: css(colour), line: { color: css("paper"), width: 1 } },
    hovertext: rows.map((row) => bytes(size(row))), hovertemplate: "%{y}<br>" + name + ": %{hovertext}<extra></extra>" });
  const parts = names.map((name) => [name, (row) => row.buffers[name] || 0, BUFFERS[name] || "dim"]);
  parts.push([w("budget.small"), (row) => row.small, "dim"], [w("budget.left"), (row) => row.left, "empty"]);
  $("budget").style.height = 110 + 72 * rows.length + "px";
  draw("budget", parts.map((part) => bar(...part)), { barmode: "stack", bargap: 0.3, xaxis: { title: w(found.frame ? "budget.threads" : "budget.bytes"), range: [0, found.room / 1024], showgrid: false, nticks: narrow() ? 5 : 9 }, yaxis: { autorange: "reversed", showgrid: false } });
  legend("budgetKey", parts.map(([name, , colour]) => [name, colour]));
}

function bankPicture(layout, banks) {
  const space = document.querySelector(".brand svg").namespaceURI, rows = Math.max(...layout.cells.map(([row]) => row)) + 1, side = 8;
  const make = (tag, attributes) => { const node = document.createElementNS(space, tag); for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value); return node; };
  const picture = make("svg", { viewBox: `0 0 ${banks * side} ${Math.max(rows, 8) * side}`, role: "img" });
  picture.append(make("rect", { x: 0, y: 0, width: banks * side, height: Math.max(rows, 8) * side, fill: css("empty") }));
  for (let bank = 1; bank < banks; bank++) picture.append(make("line", { x1: bank * side, x2: bank * side, y1: 0, y2: Math.max(rows, 8) * side, stroke: css("paper"), "stroke-width": bank % 8 ? 0.4 : 1.2 }));
  for (const [row, bank, goes] of layout.cells) picture.append(make("rect", { x: bank * side + 0.7, y: row * side + 0.7, width: side - 1.4, height: side - 1.4, rx: 1, fill: css(goes > 1 ? "amber" : "blue"), class: goes > 1 ? "shared" : "alone" }));
  return picture;
}
function showBanks() {
  const key = state.dim + "|" + state.access, found = R.banks[key];
  $("banks-p").textContent = w("banks.p", found);
  legend("banksKey", [[w("banks.alone"), "blue"], [w("banks.shared"), "amber"]]);
  $("banks").replaceChildren(...Object.entries(found.layouts).map(([name, layout]) => {
    const figure = element("figure", undefined, { "data-layout": name }), caption = element("figcaption");
    caption.append(element("b", w("layout." + name)), document.createTextNode(w("banks.goes", { degree: layout.degree, transactions: count(layout.transactions) })));
    const picture = bankPicture(layout, found.banks);
    picture.setAttribute("aria-label", w("layout." + name) + ": " + w("banks.axis", { last: found.banks - 1 }));
    figure.append(caption, picture);
    return figure;
  }));
  $("banksKey").append(element("span", w("banks.axis", { last: found.banks - 1 })));
  conclude("banks", key);
}
