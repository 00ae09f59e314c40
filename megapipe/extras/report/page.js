const tip = document.documentElement.appendChild(document.createElement("div")), known = new WeakMap();
tip.className = "tip";
let marked = null;
const show = v => v === 0 || (Math.abs(v) >= 0.001 && Math.abs(v) < 1e6) ? v.toLocaleString("en", {maximumSignificantDigits: 5}) : v.toExponential(2);
const near = (points, step) => points.reduce((best, p) => Math.abs(p[0] - step) < Math.abs(best[0] - step) ? p : best);
const mark = (svg, place) => {
  marked = svg.querySelector(".hover");
  for (const [name, value] of Object.entries({...place, visibility: "visible"})) marked.setAttribute(name, value);
};
const leave = () => { tip.style.display = "none"; marked?.setAttribute("visibility", "hidden"); };
const kinds = {
  chart(svg, curves, [x0, slope, top, bottom], x) {
    const given = curves.filter(c => c.points.length), step = near(given.map(c => near(c.points, (x - x0) / slope)), (x - x0) / slope)[0];
    const here = x0 + slope * step, lines = [svg.dataset.axis + " " + step.toLocaleString("en")];
    mark(svg, {x1: here, x2: here, y1: top, y2: bottom});
    for (const c of given) {
      const [at, value] = near(c.points, step), other = at === step ? "" : " (" + svg.dataset.axis + " " + at.toLocaleString("en") + ")";
      if (Math.abs(at - step) * slope < 30) lines.push(c.name + " " + show(value) + " " + svg.dataset.unit + other);
    }
    return lines.join("\n");
  },
  heat(svg, map, [left, width, top, height], x, y) {
    const expert = Math.floor((x - left) / width), row = Math.floor((y - top) / height), load = map.load[row]?.[expert];
    if (load === undefined) return leave();
    mark(svg, {x: left + expert * width, y: top + row * height});
    const rank = map.ep > 1 ? " (ep rank " + Math.floor(expert / map.per_rank) + ")" : "";
    return "layer " + map.layers[row] + ", expert " + expert + rank + "\n" + load.toFixed(2) + " times the mean, "
      + (100 * load / (map.load[row].reduce((sum, each) => sum + each, 0) || 1)).toFixed(1) + "% of the layer's load";
  },
};
function point(event) {
  leave();
  const svg = event.target.closest?.("svg[data-frame]");
  if (!svg) return;
  if (!known.has(svg)) {
    svg.querySelectorAll(":not(line) > title").forEach(title => title.remove());
    known.set(svg, JSON.parse(svg.querySelector("metadata").textContent));
  }
  const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
  const text = kinds[svg.classList[0]](svg, known.get(svg), svg.dataset.frame.split(" ").map(Number), (event.clientX - box.left) * scale, (event.clientY - box.top) * scale);
  if (!text) return;
  tip.textContent = text;
  tip.style.display = "block";
  tip.style.left = Math.max(6, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 6)) + "px";
  tip.style.top = (event.clientY + 22 + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 12 : event.clientY + 18) + "px";
}
for (const kind of ["pointermove", "pointerdown"]) document.addEventListener(kind, point);
document.documentElement.addEventListener("pointerleave", leave);
document.addEventListener("scroll", leave, true);
