for (const svg of document.querySelectorAll("svg.chart")) {
  const curves = JSON.parse(svg.querySelector("metadata").textContent), [x0, slope, top, bottom] = svg.dataset.frame.split(" ").map(Number);
  const hover = svg.querySelector(".hover"), line = hover.firstChild, readout = svg.closest("figure").querySelector(".readout");
  const near = (points, step) => points.reduce((best, p) => Math.abs(p[0] - step) < Math.abs(best[0] - step) ? p : best);
  const show = v => v === 0 || (Math.abs(v) >= 0.001 && Math.abs(v) < 1e6) ? v.toLocaleString("en", {maximumSignificantDigits: 5}) : v.toExponential(2);
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const step = near(curves.flatMap(c => c.points.length ? [near(c.points, (x - x0) / slope)] : []), (x - x0) / slope)[0];
    const at = x0 + slope * step;
    for (const [name, value] of Object.entries({x1: at, x2: at, y1: top, y2: bottom})) line.setAttribute(name, value);
    hover.setAttribute("visibility", "visible");
    readout.textContent = svg.dataset.axis + " " + step.toLocaleString("en") + ": " + curves.filter(c => c.points.some(p => p[0] === step))
      .map(c => c.name + " " + show(near(c.points, step)[1]) + " " + svg.dataset.unit).join(", ");
  });
  svg.addEventListener("pointerleave", () => { hover.setAttribute("visibility", "hidden"); readout.textContent = ""; });
}
