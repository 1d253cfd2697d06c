// Line charts and stacked bars as SVG and HTML, by hand. No data leaves the page, none is put in as markup.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 360, HEIGHT = 130, LEFT = 44, BOTTOM = 18, TOP = 8, RIGHT = 8;

/** An element with attributes and children; strings become text, never markup. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function shape(name, attributes, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** "1 group", "2 groups". */
export function many(count, noun) {
  return `${short(count)} ${noun}${count === 1 ? "" : "s"}`;
}

/** Short and stable in width: 0.031, 1.2, 340, 12.4k, 3.1M. */
export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  if (Number.isInteger(value)) return String(value);
  if (size >= 100) return value.toFixed(0);
  if (size >= 1) return value.toFixed(2);
  return size < 1e-3 && size > 0 ? value.toExponential(1) : value.toFixed(3);
}

/** A round step that gives about `count` lines over `span`. */
function tickStep(span, count) {
  const rough = span / count, power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((step) => step >= rough);
}

function ticks(low, high, count) {
  const step = tickStep(high - low, count), lines = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) lines.push(at);
  return lines.map((at) => Number(at.toPrecision(6)));
}

/** curve: {title, steps, values}; a null value is a gap. Hovering names step and value. */
export function lineChart(curve) {
  const points = curve.steps.map((step, at) => [step, curve.values[at]]);
  const known = points.filter(([, value]) => value !== null);
  const last = known.length ? known[known.length - 1][1] : null;
  const reading = element("span", { class: "reading" }, short(last));
  const figure = element("figure", { class: "chart" }, element("figcaption", {}, curve.title, reading));
  if (!known.length) return figure;

  let low = Math.min(...known.map(([, value]) => value)), high = Math.max(...known.map(([, value]) => value));
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) * 0.5, high + (Math.abs(high) || 1) * 0.5];
  const first = curve.steps[0], end = Math.max(curve.steps[curve.steps.length - 1], first + 1);
  const x = (step) => LEFT + ((step - first) / (end - first)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => TOP + (1 - (value - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);

  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${curve.title}: ${short(last)}` });
  for (const at of ticks(low, high, 4)) {
    svg.append(shape("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(at), y2: y(at) }));
    svg.append(shape("text", { class: "tick", x: LEFT - 5, y: y(at) + 3, "text-anchor": "end" }, short(at)));
  }
  for (const at of ticks(first, end, 4).filter(Number.isInteger)) {
    svg.append(shape("text", { class: "tick", x: x(at), y: HEIGHT - 4, "text-anchor": "middle" }, String(at)));
  }
  let path = "", pen = "M";
  for (const [step, value] of points) {
    if (value === null) { pen = "M"; continue; }
    path += `${pen}${x(step).toFixed(1)},${y(value).toFixed(1)}`;
    pen = "L";
  }
  svg.append(shape("path", { class: "curve", d: path }));
  const dot = shape("circle", { class: "dot", r: 3, cx: x(known[known.length - 1][0]), cy: y(last) });
  svg.append(dot);

  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = first + (((event.clientX - box.left) / box.width) * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT) * (end - first);
    const near = known.reduce((best, point) => (Math.abs(point[0] - at) < Math.abs(best[0] - at) ? point : best));
    dot.setAttribute("cx", x(near[0]));
    dot.setAttribute("cy", y(near[1]));
    reading.textContent = `step ${near[0]}: ${short(near[1])}`;
  });
  svg.addEventListener("pointerleave", () => {
    dot.setAttribute("cx", x(known[known.length - 1][0]));
    dot.setAttribute("cy", y(last));
    reading.textContent = short(last);
  });
  figure.append(svg);
  return figure;
}

/** parts: [[class, label, amount]]; the whole is their sum. */
export function stackedBar(parts) {
  const total = parts.reduce((sum, [, , amount]) => sum + amount, 0);
  const bar = element("div", { class: "bar", role: "img", "aria-label": parts.map(([, label, n]) => `${label} ${n}`).join(", ") });
  const legend = element("ul", { class: "legend" });
  for (const [kind, label, amount] of parts) {
    const share = total ? (100 * amount) / total : 0;
    const piece = shape("svg", { class: `piece ${kind}`, width: `${share}%`, height: "100%" });
    piece.append(shape("title", {}, `${label}: ${amount}`));
    if (amount) bar.append(piece);
    legend.append(element("li", {}, element("i", { class: `swatch ${kind}` }), `${label} `, element("b", {}, short(amount)), ` ${share.toFixed(share < 10 ? 1 : 0)} %`));
  }
  return element("div", {}, bar, legend);
}
