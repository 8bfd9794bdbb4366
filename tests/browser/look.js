// What is wrong with the page as it stands now: a list of sentences. Asked by test_site_looks.py at each width, light and dark.
const wrong = [], root = document.documentElement, main = document.querySelector(".md-content");
const name = (text) => (text || "").trim().replace(/\s+/g, " ").slice(0, 40);

// Nothing is on its way: what the theme slides and fades is where it goes.
if (!document.getElementById("look-still")) {
  const still = document.createElement("style");
  still.id = "look-still";
  still.textContent = "*, ::before, ::after { transition: none !important; }";
  document.head.append(still);
}

// Colours as [red, green, blue, opacity], laid over each other, and their contrast as WCAG counts it.
const paint = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const colour = (css) => {
  paint.clearRect(0, 0, 1, 1);
  paint.fillStyle = css;
  paint.fillRect(0, 0, 1, 1);
  const [r, g, b, a] = paint.getImageData(0, 0, 1, 1).data;
  return [r, g, b, a / 255];
};
const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
const light = (c) => {
  const [r, g, b] = c.map((v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const contrast = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
const behind = (element) => {
  const layers = [];
  for (let e = element; e; e = e.parentElement) layers.push(colour(getComputedStyle(e).backgroundColor));
  return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255, 1]);
};

if (root.scrollWidth > root.clientWidth) wrong.push(`the page is ${root.scrollWidth - root.clientWidth} px wider than the screen`);
for (const image of document.images) if (!image.complete || !image.naturalWidth) wrong.push(`no image: ${image.src}`);
for (const element of main.querySelectorAll("p, li, table, pre, figure, h1, h2, h3, iframe, canvas, math, svg")) {
  const { left, right, width } = element.getBoundingClientRect();
  if (!width || (left >= -1 && right <= root.clientWidth + 1)) continue;
  let scroller = element.parentElement;
  while (scroller && getComputedStyle(scroller).overflowX === "visible") scroller = scroller.parentElement;
  if (!main.contains(scroller)) wrong.push(`${element.tagName} leaves the screen: ${name(element.textContent)}`);
}
if (root.clientWidth > 1220)
  for (const code of main.querySelectorAll("pre > code"))
    if (code.scrollWidth > code.clientWidth + 1 && code.innerText.split("\n").every((line) => line.length <= 120))
      wrong.push(`code of at most 120 columns does not fit: ${name(code.textContent)}`);

// Pictures: words inside them, apart from each other and from lines, legible on what they stand on.
const meet = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4;
for (const svg of main.querySelectorAll("svg[role=img]")) {
  const say = (text) => wrong.push(`${name(svg.getAttribute("aria-label"))}: ${text}`);
  const frame = svg.getBoundingClientRect(), paper = behind(svg);
  if (!frame.width) say("takes no room");
  const words = [...svg.querySelectorAll("text")].map((e) => ({ e, at: e.getBoundingClientRect() }));
  const rects = [...svg.querySelectorAll("rect")].map((e) => ({ e, at: e.getBoundingClientRect(), fill: colour(getComputedStyle(e).fill) }));
  const lines = [...svg.querySelectorAll("line")].map((e) => {
    const to = e.getScreenCTM(), end = (n) => new DOMPoint(+e.getAttribute(`x${n}`), +e.getAttribute(`y${n}`)).matrixTransform(to);
    return [end(1), end(2)];
  });
  words.forEach(({ e, at }, i) => {
    const text = e.textContent;
    if (at.left < frame.left - 1 || at.right > frame.right + 1 || at.top < frame.top - 1 || at.bottom > frame.bottom + 1) say(`"${text}" is cut`);
    for (const other of words.slice(i + 1)) if (meet(at, other.at)) say(`"${text}" and "${other.e.textContent}" overlap`);
    for (const [a, b] of lines)
      for (let u = 0; u <= 1; u += 0.02) {
        const x = a.x + (b.x - a.x) * u, y = a.y + (b.y - a.y) * u;
        if (x < at.left + 1 || x > at.right - 1 || y < at.top + 3 || y > at.bottom - 3) continue;
        say(`a line goes through "${text}"`);
        break;
      }
    const x = (at.left + at.right) / 2, y = (at.top + at.bottom) / 2;
    const under = rects.filter(({ e: r, at: q }) => r.compareDocumentPosition(e) & 4 && q.left <= x && x <= q.right && q.top <= y && y <= q.bottom);
    const ratio = contrast(colour(getComputedStyle(e).fill), under.reduce((below, { fill }) => over(fill, below), paper));
    if (ratio < 4.5) say(`"${text}" has a contrast of ${ratio.toFixed(2)}`);
  });
}
return [...new Set(wrong)];
