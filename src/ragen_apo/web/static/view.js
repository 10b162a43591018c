// The run page: reads values of a curve under the pointer or by arrow keys, and refreshes itself
// while the run trains. Without it every page works, read once.
"use strict";

const POLL_MS = 4000;

function readingOf(svg, position) {
  const lines = [...svg.querySelectorAll("polyline[data-values]")];
  const series = lines.map((line) => line.dataset.values.split(" ").map((pair) => pair.split(":").map(Number)));
  const longest = series.reduce((a, b) => (b.length > a.length ? b : a), []);
  if (!longest.length) return "";
  const index = Math.max(0, Math.min(longest.length - 1, position(longest)));
  svg.dataset.index = index;
  const step = longest[index][0];
  const keys = svg.closest("figure").querySelectorAll(".key");
  const parts = series.map((points, each) => {
    const nearest = points.reduce((a, b) => (Math.abs(b[0] - step) < Math.abs(a[0] - step) ? b : a));
    const name = series.length > 1 ? keys[each].textContent.split(" ")[0] + " " : "";
    return `${name}${nearest[1]}` + (nearest[0] === step ? "" : ` (step ${nearest[0]})`);
  });
  return `step ${step}: ${parts.join(", ")}`;
}

function show(svg, position) {
  svg.closest("figure").querySelector("output").textContent = readingOf(svg, position);
}

document.addEventListener("pointermove", (event) => {
  const svg = event.target.closest?.(".curve svg");
  if (!svg) return;
  const box = svg.getBoundingClientRect();
  const view = svg.viewBox.baseVal;
  const left = Number(svg.querySelector(".grid").getAttribute("x1"));
  const right = Number(svg.querySelector(".grid").getAttribute("x2"));
  const x = ((event.clientX - box.left) / box.width) * view.width;
  const share = (x - left) / (right - left);
  show(svg, (points) => {
    const step = points[0][0] + share * (points[points.length - 1][0] - points[0][0]);
    return points.reduce((best, point, i) => (Math.abs(point[0] - step) < Math.abs(points[best][0] - step) ? i : best), 0);
  });
});

document.addEventListener("keydown", (event) => {
  const svg = event.target.closest?.(".curve svg");
  const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!svg || !move) return;
  event.preventDefault();
  show(svg, (points) => (svg.dataset.index === undefined ? (move > 0 ? 0 : points.length - 1) : Number(svg.dataset.index) + move));
});

async function refresh(region) {
  // Who reads a value or stands on a link is not disturbed.
  if (!region.contains(document.activeElement) && !document.hidden) {
    try {
      const answer = await fetch(region.dataset.live);
      if (answer.ok) {
        const page = await answer.text();
        if (page !== region.dataset.seen && !region.contains(document.activeElement)) {
          region.innerHTML = page;
          region.dataset.seen = page;
        }
      }
    } catch {
      // The server was stopped; it may come back.
    }
  }
  setTimeout(refresh, POLL_MS, region);
}

const region = document.querySelector("[data-live]");
if (region) setTimeout(refresh, POLL_MS, region);
